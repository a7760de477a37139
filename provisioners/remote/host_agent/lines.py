"""The lines of a log that messages quote."""

from __future__ import annotations

import re

LINE_CHARS = 300

#: Colours, cursor movements and window titles of terminals.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)")
_BREAKS = re.compile(r"[\r\n]+")  # progress bars overwrite their line after a carriage return
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_FRAME = " \t" + "".join(map(chr, range(0x2500, 0x25A0)))  # box drawing and block elements
_WORD = re.compile(r"[^\W\d_]{2}")


def last_text_line(log: bytes) -> str:
    """Return the last line with two letters in a row, without the frame around it.

    Not a rule, a bracket or the carets under an expression.

    Returns the last line that is not blank where no line has words, and "" where all are blank.
    """
    lines = text_lines(log)
    last = lines[-1] if lines else ""
    return next((line for line in reversed(lines) if _WORD.search(line)), last)


def text_lines(log: bytes) -> list[str]:
    """Return the lines that are not blank, without frames and control characters, each cut to LINE_CHARS."""
    text = _ESCAPES.sub("", log.decode(errors="replace"))
    lines = [_CONTROLS.sub(" ", line).strip(_FRAME)[:LINE_CHARS] for line in _BREAKS.split(text)]
    return [line for line in lines if line]
