"""A shell script as the words of its commands, as far as they can be seen without running it.

Quotes, escapes, continued lines, comments, here-documents and redirections are understood. What a variable or ``$(…)`` would be
is not known: such a word `expands`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>|>\||>&|<&|&>|>|<)(?:&?\d+|-)?")
_SEPARATORS = ("&&", "||", ";;", "|&", "\n", ";", "|", "&")
_CLOSING = {"(": ")", "{": "}"}


class Word(NamedTuple):
    """`raw` is what was written, `text` the same without quotes. `expands`: the shell puts something else there."""

    raw: str
    text: str
    expands: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """One simple command. `end` is the separator behind it, `redirections` its redirections as they were written."""

    words: tuple[Word, ...]
    assignments: tuple[tuple[str, Word], ...] = ()
    redirections: tuple[str, ...] = ()
    end: str = ""

    @property
    def texts(self) -> list[str]:
        return [word.text for word in self.words]


def commands(script: str) -> list[Command]:
    """Return the simple commands of a script, in order. Never raises: what cannot be read is a word."""
    return _Scanner(_without_documents(script.replace("\r\n", "\n"))).commands()


def _without_documents(script: str) -> str:
    """Return the script without here-documents, which are no commands. One that does not end is none."""
    lines = script.split("\n")
    last = {line.strip(): index for index, line in enumerate(lines)}
    kept, end = [], None
    for index, line in enumerate(lines):
        if end is not None:
            end = None if line.strip() == end else end
            continue
        match = _HERE_DOCUMENT.search(line)
        if match is not None and last.get(match[2], -1) > index:
            end = match[2]
            line = _HERE_DOCUMENT.sub("", line)
        kept.append(line)
    return "\n".join(kept)


def unusable(text: str) -> str | None:
    """Return the first character of the text that no line of a script should have, as ``U+00A0``; None without one."""
    found = next((letter for letter in text if not letter.isprintable() and letter not in "\n\t\r"), None)
    return None if found is None else f"U+{ord(found):04X}"


def word_of(text: str, *, keep_variables: bool = False) -> Word:
    """Return a word for a text; with `keep_variables` the shell still fills in the variables in it."""
    if keep_variables and "$" in text:
        inner = re.sub(r'([\\"`])', r"\\\1", text)
        return Word(f'"{inner}"', text, True)
    return Word(shlex.quote(text), text)


def after_assignments(words: Sequence[Word]) -> tuple[tuple[tuple[str, Word], ...], tuple[Word, ...]]:
    """Return the leading ``NAME=VALUE`` words as pairs, and the other words."""
    found: list[tuple[str, Word]] = []
    for index, word in enumerate(words):
        if not _ASSIGNMENT.match(word.raw):
            return tuple(found), tuple(words[index:])
        name, _, value = word.text.partition("=")
        found.append((name, Word(word.raw.partition("=")[2], value, word.expands)))
    return tuple(found), ()


@dataclass(slots=True)
class _Scanner:
    text: str
    at: int = 0
    found: list[Command] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    redirections: list[str] = field(default_factory=list)

    def commands(self) -> list[Command]:
        while self.at < len(self.text):
            self._step()
        self._end("")
        return self.found

    def _step(self) -> None:
        rest = self.text[self.at : self.at + 64]
        if rest.startswith("\\\n"):
            self.at += 2
        elif rest[0] in " \t":
            self.at += 1
        elif rest[0] == "#":
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end
        elif match := _REDIRECTION.match(rest):
            self.at += match.end()
            self._redirection(match[0])
        elif separator := next((one for one in _SEPARATORS if rest.startswith(one)), None):
            self.at += len(separator)
            self._end(separator)
        elif rest[0] in "()":
            self.at += 1
            self._end(rest[0])
        else:
            self.words.append(self._word())

    def _redirection(self, operator: str) -> None:
        """Take the file of a redirection along, unless the operator names a descriptor."""
        if not operator[-1].isdigit() and operator[-1] != "-":
            while self.text[self.at : self.at + 1] in (" ", "\t"):
                self.at += 1
            if self.at < len(self.text) and self.text[self.at] not in "\n;|&()":
                operator += self._word().raw
        self.redirections.append(operator)

    def _end(self, separator: str) -> None:
        assignments, words = after_assignments(self.words)
        if words or assignments:
            self.found.append(Command(words, assignments, tuple(self.redirections), separator))
        self.words, self.redirections = [], []

    def _word(self) -> Word:
        start, text, expands = self.at, "", False
        while self.at < len(self.text) and self.text[self.at] not in " \t\n;|&()<>":
            piece, fills = self._piece()
            text, expands = text + piece, expands or fills
        if self.at == start:  # a lone character that begins nothing known
            self.at += 1
            text = self.text[start]
        return Word(self.text[start : self.at], text, expands)

    def _piece(self) -> tuple[str, bool]:
        """Return the next piece of a word without its quotes, and whether the shell fills it in."""
        letter = self.text[self.at]
        if letter == "\\":
            self.at += 2
            escaped = self.text[self.at - 1 : self.at]
            return ("" if escaped == "\n" else escaped), False
        if letter == "'":
            return self._until("'"), False
        if letter == '"':
            return self._quoted()
        if letter == "`":
            return self._until("`"), True
        if letter == "$":
            return self._expansion(), True
        self.at += 1
        return letter, False

    def _until(self, quote: str) -> str:
        end = self.text.find(quote, self.at + 1)
        end = len(self.text) if end < 0 else end
        inner = self.text[self.at + 1 : end]
        self.at = end + 1
        return inner

    def _quoted(self) -> tuple[str, bool]:
        text, expands = "", False
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != '"':
            letter = self.text[self.at]
            if letter == "\\" and self.text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\", "\n"):
                text += self.text[self.at + 1].replace("\n", "")
                self.at += 2
            elif letter in "$`":
                text += self._expansion() if letter == "$" else self._until("`")
                expands = True
            else:
                text += letter
                self.at += 1
        self.at += 1
        return text, expands

    def _expansion(self) -> str:
        """Return ``$NAME``, ``${…}`` or ``$(…)`` as it is written."""
        start = self.at
        self.at += 1
        opening = self.text[self.at : self.at + 1]
        if opening not in _CLOSING:
            while self.text[self.at : self.at + 1].isalnum() or self.text[self.at : self.at + 1] == "_":
                self.at += 1
            return self.text[start : self.at]
        depth = 0
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter == "'" and opening == "(":
                self._until(letter)
                continue
            depth += (letter == opening) - (letter == _CLOSING[opening])
            self.at += 1
            if depth == 0:
                break
        return self.text[start : self.at]
