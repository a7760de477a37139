"""Which line of a log a message quotes."""

from __future__ import annotations

import pytest

from provisioners.remote.host_agent.lines import LINE_CHARS, last_text_line

FRAMED = """
Usage: serve engine [OPTIONS]
╭─ Error ─────────────────────────╮
│ No such option: --cold          │
╰─────────────────────────────────╯
"""
TRACEBACK = """
Traceback (most recent call last):
  File "serve.py", line 3, in <module>
    load(
    ^^^^^
ValueError: no weights in /models
    }
])
"""


@pytest.mark.parametrize(
    ("log", "quoted"),
    [
        pytest.param("", "", id="an empty log"),
        pytest.param("one\ntwo\n\n  \n", "two", id="blank lines at the end"),
        pytest.param("no end of line", "no end of line", id="a line without its end"),
        pytest.param(FRAMED, "No such option: --cold", id="a message in a frame"),
        pytest.param(TRACEBACK, "ValueError: no weights in /models", id="brackets after a traceback"),
        pytest.param("bad token\n  ^~~~\n", "bad token", id="carets under an expression"),
        pytest.param("out of disk\n42\nx\n", "out of disk", id="a number and a letter"),
        pytest.param("---\n42\n\n", "42", id="no line with words"),
        pytest.param("\x1b[31mCUDA out of memory\x1b[0m\n\x1b[2K\x1b[1A", "CUDA out of memory", id="colours"),
        pytest.param("loading  10%\rloading 100%\r", "loading 100%", id="a progress bar"),
        pytest.param("кот не найден\n═══\n", "кот не найден", id="letters of any alphabet"),
        pytest.param("word " * 100, ("word " * 100)[:LINE_CHARS], id="a long line"),
    ],
)  # fmt: skip
def test_the_last_line_with_words_is_quoted(log: str, quoted: str) -> None:
    assert last_text_line(log.encode()) == quoted


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert last_text_line(b"\xff broken \xe2") == "\ufffd broken \ufffd"
