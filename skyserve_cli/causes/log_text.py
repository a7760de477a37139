"""The text of a replica's log as it may be shown: without control characters and without secrets. Pure."""

from __future__ import annotations

import re

#: Of a log only its end is read.
TAIL_BYTES = 64 * 1024
LINE_CHARS = 200
HIDDEN = "***"

#: Colours, cursor movements and window titles of terminals.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)")
_BREAKS = re.compile(r"[\r\n]+")  # progress bars overwrite their line after a carriage return
_WORD = re.compile(r"[^\W\d_]{2}")

_VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s\"',;&]+)"
_NAME = r"(?:token|secret|password|passwd|passphrase|api[_-]?key|access[_-]?key|account[_-]?key|private[_-]?key|credentials?)"
#: What is hidden, and what stays of it. A name in front of a value stays, so that a reader sees which value it was.
_SECRETS = (
    (re.compile(r"(://)[^/\s@]+@"), rf"\1{HIDDEN}@"),
    (re.compile(rf"(?i)(authorization[\"']?\s*[:=]\s*[\"']?(?:[a-z]+\s+)?){_VALUE}"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b((?:bearer|basic)\s+)[\w.~+/=-]{8,}"), rf"\1{HIDDEN}"),
    (re.compile(rf"(?i)({_NAME}[\"']?\s*[:=]\s*){_VALUE}"), rf"\1{HIDDEN}"),
    (re.compile(rf"(?i)(--[\w-]*{_NAME}\s+){_VALUE}"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)([?&](?:sig|signature|key|code|x-[\w-]+)=)[^&\s\"']+"), rf"\1{HIDDEN}"),
    (re.compile(r"\b(hf_|sk-|gh[a-z]_|github_pat_|glpat-|xox[a-z]-|AKIA|ASIA|AIza|nvapi-)[\w-]{6,}"), rf"\1{HIDDEN}"),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w.-]+"), HIDDEN),
    (re.compile(r"(?<![\w./-])(?=[A-Za-z_+=-]*\d)[\w+=-]{40,}"), HIDDEN),
)  # fmt: skip


def cleaned(log: bytes) -> str:
    """Return the end of a log as lines without control characters. Nothing is hidden yet: rules look for whole words."""
    text = _ESCAPES.sub("", log[-TAIL_BYTES:].decode(errors="replace"))
    lines = ("".join(c for c in line if c.isprintable() or c == "\t").strip() for line in _BREAKS.split(text))
    return "\n".join(line for line in lines if line)


def quoted(line: str, most: int = LINE_CHARS) -> str:
    """Return a line to show: on one line, without secrets and control characters, cut at `most` characters."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in _ESCAPES.sub("", line)).split())
    for pattern, rest in _SECRETS:
        flat = pattern.sub(rest, flat)
    return flat if len(flat) <= most else flat[: most - 1] + "…"


def last_line(log: str) -> str:
    """Return the last line with words, to show; empty if there is none."""
    return quoted(next((line for line in reversed(log.splitlines()) if _WORD.search(line)), ""))
