"""Docstrings and comments of tests keep to the words of `scripts/words.txt`; codespell checks all other files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.prose import REJECTED, prose_of

TESTS = Path(__file__).parents[1]
LITERAL = re.compile(r"`[^`\n]*`")
PATTERN = re.compile(rf"\b({'|'.join(REJECTED)})\b", re.IGNORECASE)


@pytest.mark.long
def test_docstrings_and_comments_of_tests_have_no_rejected_word() -> None:
    pieces = list(prose_of(TESTS, docs=True))
    assert len(pieces) > 1000
    found = [
        f"{piece.path}:{piece.line}: {hit[0]}"
        for piece in pieces
        for hit in PATTERN.finditer(LITERAL.sub("", piece.text))
    ]
    assert found == []
