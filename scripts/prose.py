"""How often words that make readers stop occur in the prose of a code base.

    python scripts/prose.py [--docs] [--each] FOLDER…

Prose is docstrings and comments; with `--docs` also Markdown outside of code blocks. The table has occurrences
per 10,000 words of prose, one column per folder, so that the folders of other projects can stand beside ours. `--each`
prints file, line and text of every occurrence instead.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

#: Words that codespell rejects here, and others that are fine in places: name in the table -> regular expression.
REJECTED = [
    line.partition("->")[0] for line in Path(__file__).with_name("words.txt").read_text().splitlines()
]
WORDS = {
    **{word: word for word in REJECTED},
    "says": r"says",
    "what is": r"what is",
    "lives": r"lives",
    "dies": r"dies",
    "ended": r"ended",
    "of late": r"of late(?! [a-z]+s\b)",
    "is none": r"is none",
    "so many": r"so many",
    "be had": r"be had",
    "all the same": r"all the same",
    "answer": r"answer(?:s|ed|ing)?",
    "asks": r"asks",
}
#: The field's words, which should be frequent.
WANTED = {
    "response": r"responses?",
    "timeout": r"timeouts?",
    "header": r"headers?",
    "retry": r"retr(?:y|ies)",
}

_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_LITERAL = re.compile(r"``?[^`\n]*``?")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_SKIPPED = {".venv", ".git", "node_modules", "vendor", "reference", "__pycache__"}


class Prose(NamedTuple):
    """A piece of prose, and the line on which it starts."""

    path: Path
    line: int
    text: str


def prose_of(folder: Path, *, docs: bool) -> Iterator[Prose]:
    """Yield the docstrings and comments of a folder, and its Markdown if `docs`."""
    for path in sorted([folder] if folder.is_file() else folder.rglob("*")):
        if path.is_file() and _SKIPPED & set(path.relative_to(folder).parts):
            continue
        if path.suffix == ".py":
            yield from _of_module(path)
        elif docs and path.suffix == ".md":
            text = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), path.read_text())
            yield from (Prose(path, number, line) for number, line in enumerate(text.splitlines(), 1))


def _of_module(path: Path) -> Iterator[Prose]:
    source = path.read_text(errors="replace")
    try:
        tree = ast.parse(source)
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, tokenize.TokenError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                first = node.body[0].lineno
                yield from (
                    Prose(path, first + number, line) for number, line in enumerate(text.splitlines())
                )
    for token in tokens:
        if token.type == tokenize.COMMENT:
            yield Prose(path, token.start[0], token.string.lstrip("#"))


def counted(pieces: Sequence[Prose], words: dict[str, str]) -> tuple[Counter[str], int]:
    """Return the occurrences of each word, and the number of all words. What stands in backticks is no prose."""
    found: Counter[str] = Counter()
    total = 0
    for piece in pieces:
        text = _LITERAL.sub(" ", piece.text)
        total += len(_WORD.findall(text))
        for name, pattern in words.items():
            found[name] += len(re.findall(rf"\b{pattern}\b", text, re.IGNORECASE))
    return found, total


def main() -> None:
    """Print the table, or every occurrence."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a comma list is one column")
    parser.add_argument("--docs", action="store_true", help="Markdown, too")
    parser.add_argument("--each", action="store_true", help="print every occurrence")
    parser.add_argument("--only", default="", metavar="WORD,…", help="these words of the list")
    arguments = parser.parse_args()
    chosen = [name for name in arguments.only.split(",") if name]
    words = {name: pattern for name, pattern in {**WORDS, **WANTED}.items() if not chosen or name in chosen}
    columns = [
        (
            str(folder),
            [piece for part in str(folder).split(",") for piece in prose_of(Path(part), docs=arguments.docs)],
        )
        for folder in arguments.folders
    ]
    if arguments.each:
        for _, pieces in columns:
            for piece in pieces:
                text = _LITERAL.sub(" ", piece.text)
                hits = [
                    name
                    for name, pattern in words.items()
                    if re.search(rf"\b{pattern}\b", text, re.IGNORECASE)
                ]
                if hits:
                    print(f"{piece.path}:{piece.line}: [{', '.join(hits)}] {piece.text.strip()}")
        return
    figures = [(Path(name.split(",")[0]).name, *counted(pieces, words)) for name, pieces in columns]
    print("| per 10,000 words | " + " | ".join(f"{name} ({total:,})" for name, _, total in figures) + " |")
    print("|---|" + "---:|" * len(figures))
    for word in words:
        cells = (f"{10_000 * found[word] / max(1, total):.1f}" for _, found, total in figures)
        print(f"| {word} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
