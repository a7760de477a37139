"""Every code block of the README and of docs/ is right: YAML is accepted by its parser, commands and options exist.

A block that cannot be checked has `<!-- not checked: REASON -->` in the line before it.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml
from typer.core import TyperGroup

from provisioners.local.config import load_cloud, read_market
from provisioners.local.store import LocalStore
from skyserve_cli.app import VERBS, build
from skyserve_cli.config import load_config
from skyserve_cli.spec.load import load_text
from tests.clouds.kubernetes import kube_schemas

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "docs" / "reference"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent != GENERATED),
]
_FENCE = re.compile(
    r"(?P<before>^[^\n]*\n)?^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *```",
    re.DOTALL | re.MULTILINE,
)
_NOT_CHECKED = re.compile(r"<!-- not checked: \S.* -->")
_SEPARATORS = {"|", "||", "&&", ";", "&"}


class Block(NamedTuple):
    """A fenced block without its indentation."""

    page: str
    number: int
    language: str
    text: str
    skipped: bool


def blocks_of(page: str, text: str) -> Iterator[Block]:
    for number, found in enumerate(_FENCE.finditer(text), 1):
        width = len(found["indent"])
        lines = [line[width:] for line in found["text"].splitlines()]
        skipped = bool(_NOT_CHECKED.search(found["before"] or ""))
        yield Block(page, number, found["language"], "\n".join(lines) + "\n", skipped)


BLOCKS = [block for page in PAGES for block in blocks_of(str(page.relative_to(ROOT)), page.read_text())]


# --- YAML


def check_yaml(text: str, folder: Path) -> None:
    """Raises an exception that names the key if no parser of the product accepts the text."""
    value = yaml.safe_load(text)
    assert isinstance(value, dict), "a mapping is expected"
    path = folder / "block.yaml"
    if value.keys() & {"clouds", "controller", "dashboard", "notify", "teams"}:
        path.write_text(text)
        load_config(path)
    elif "timeline" in value:
        path.write_text(text)
        read_market(path, load_cloud(LocalStore(folder / "local")), 0.0)
    elif "apiVersion" in value:
        kube_schemas.check(value)
    else:
        whole = {"run": "sleep infinity", "service": {}, **value}
        loaded = load_text(yaml.safe_dump(whole), name="block", needs_values=False)
        assert loaded.spec.name


# --- commands


@cache
def command_of(words: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
    """Returns the command that the words name, and the words that are left."""
    if not words or words[0] not in VERBS:
        raise AssertionError(f"there is no command: serve {' '.join(words[:1])}")
    root = typer.main.get_command(build(words[0]))
    assert isinstance(root, TyperGroup)
    command: Any = root.commands[words[0]]
    rest = words[1:]
    while isinstance(command, TyperGroup) and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            raise AssertionError(f"there is no command: serve {words[0]} {rest[0]}")
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def check_command(words: list[str]) -> None:
    """Raises AssertionError if `serve WORDS` names a command or an option that does not exist."""
    if not words or words[0] in ("--help", "--version", "--install-completion"):
        return
    command, rest = command_of(tuple(words))
    options = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"-h", "--help"}
    for word in rest:
        if word == "--":
            return
        name = word.partition("=")[0]
        if name.startswith("--"):
            assert name in options, f"serve {words[0]} has no option {name}"
        elif name.startswith("-") and len(name) > 1 and not name[1].isdigit():
            assert name[:2] in options, f"serve {words[0]} has no option {name}"


def commands_in(text: str) -> Iterator[list[str]]:
    """Yields the arguments of every call of `serve` in a shell block, those inside of $(...) included."""
    joined = text.replace("\\\n", " ")
    for line in joined.splitlines():
        line = line.strip().removeprefix("$ ")
        inner = re.findall(r"\$\(([^()]*)\)", line)
        for part in [*inner, re.sub(r"\$\([^()]*\)", "X", line)]:
            lexer = shlex.shlex(part, posix=True, punctuation_chars="|&;")
            lexer.whitespace_split, lexer.commenters = True, "#"
            words: list[str] = []
            for word in [*lexer, ";"]:
                if word in _SEPARATORS:
                    while words and re.match(r"\w+=", words[0]):
                        del words[0]
                    if words and words[0].rpartition("/")[2] == "serve":
                        yield words[1:]
                    words = []
                elif word[:1] in "<>" or word in ("2>&1",):
                    continue
                else:
                    words.append(word)


def check_shell(text: str, folder: Path) -> None:
    for words in commands_in(text):
        check_command([word for word in words if not word.startswith("[")])


CHECKS: dict[str, Callable[[str, Path], object]] = {
    "yaml": check_yaml,
    "bash": check_shell,
    "console": check_shell,
    "json": lambda text, _: json.loads(text),
    "toml": lambda text, _: tomllib.loads(text),
    "python": lambda text, _: ast.parse(text),
    "text": lambda text, _: None,
    "": lambda text, _: None,
}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}-{block.number}-{block.language}")
def test_a_block_is_right(block: Block, tmp_path: Path) -> None:
    assert block.language in CHECKS, f"no check for blocks of {block.language!r}"
    if not block.skipped:
        CHECKS[block.language](block.text, tmp_path)


def test_there_are_blocks_of_every_kind() -> None:
    assert {block.language for block in BLOCKS} >= {"yaml", "bash", "console", "python", "json", "toml"}


# --- the checks can fail


@pytest.mark.parametrize(
    "text",
    [
        "service: {replica_policy: {min_replica: 1}}",
        "service: {replicas: many}",
        "clouds: {aws: {regionz: [x]}}",
        "serviec: {}",
        "- 1",
    ],
)
def test_wrong_yaml_is_found(text: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"."):
        check_yaml(text, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "serve upp service.yaml",
        "$ serve up service.yaml --dryrun",
        "cat x | serve status --endpont",
        'curl "$(serve stats --endpoint x)/v1/models"',
        "serve controller begin",
        "A=1 .venv/bin/serve down --everything",
        "serve up a.yaml && serve status -q",
    ],
)
def test_a_command_that_does_not_exist_is_found(text: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="serve"):
        check_shell(text, tmp_path)


@pytest.mark.parametrize(
    "text",
    ["serve up service.yaml -y", 'curl "$(serve status --endpoint x)/v1" | head', "serve exec x -- ls -la"],
)
def test_a_right_command_passes(text: str, tmp_path: Path) -> None:
    check_shell(text, tmp_path)


def test_a_marked_block_is_left_out() -> None:
    (block,) = blocks_of("page", "<!-- not checked: it is a sketch -->\n```yaml\n: :\n```\n")
    assert block.skipped
