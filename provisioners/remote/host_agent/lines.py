"""The line of a log that a message quotes."""

from __future__ import annotations

import re

LINE_CHARS = 300

#: Colours, cursor movements and window titles of terminals.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)")
_BREAKS = re.compile(r"[\r\n]+")  # progress bars overwrite their line after a carriage return
_FRAME = " \t" + "".join(map(chr, range(0x2500, 0x25A0)))  # box drawing and block elements
_WORD = re.compile(r"[^\W\d_]{2}")


def last_text_line(log: bytes) -> str:
    """Return the last line with two letters in a row, without the frame around it.

    Not a rule, a bracket or the carets under an expression.

    Returns the last line that is not blank where no line has words, and "" where all are blank.
    """
    text = _ESCAPES.sub("", log.decode(errors="replace"))
    lines = [line.strip(_FRAME)[:LINE_CHARS] for line in _BREAKS.split(text)]
    last = next((line for line in reversed(lines) if line), "")
    return next((line for line in reversed(lines) if _WORD.search(line)), last)
