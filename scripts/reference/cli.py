"""The page of the commands, from the Typer application."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup, TyperOption

from scripts.reference.text import NOTE, code, table
from skyserve_cli.app import VERBS, build

_MARKUP = re.compile(r"\[/?(?:bold|dim|italic|cyan|green|red|yellow|b|i)\]")


def page() -> str:
    """Returns the page in Markdown."""
    parts = [
        NOTE,
        "# Commands\n",
        "`serve --help` lists the commands, `serve COMMAND --help` describes one. Exit codes: 0 success, 1 failure, 2 wrong usage or "
        "a wrong file, 4 a database that cannot be used, 124 not done in time, 130 interrupted.\n",
        "Options before the command:\n",
        table(
            ["option", "value", "default", "meaning"],
            [row for row in parameters(typer.main.get_command(build(None))) if "completion" not in row[0]],
        ),
    ]
    for path, command in commands():
        parts.append(f"## `serve {path}`\n")
        parts.append(plain(command.help or "").strip() + "\n")
        parts.append(f"```text\n{usage(path, command)}\n```\n")
        rows = list(parameters(command))
        if rows:
            parts.append(table(["argument or option", "value", "default", "meaning"], rows))
    return "\n".join(parts)


def commands() -> Iterator[tuple[str, Any]]:
    """Yields every command that does something, with its words after `serve`."""
    for name in VERBS:
        root = typer.main.get_command(build(name))
        if not isinstance(root, TyperGroup):
            raise TypeError(f"{name} has no group above it")
        yield from _below(name, root.commands[name])


def _below(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(command, TyperGroup):
        for name, one in command.commands.items():
            yield from _below(f"{path} {name}", one)
    else:
        yield path, command


def usage(path: str, command: Any) -> str:
    pieces = command.collect_usage_pieces(typer.Context(command, info_name=path))
    return " ".join(["serve", path, *pieces])


def parameters(command: Any) -> Iterator[tuple[str, str, str, str]]:
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        if isinstance(parameter, TyperOption):
            names = ", ".join([*parameter.opts, *parameter.secondary_opts])
            value = "" if parameter.is_flag else kind(parameter)
        else:
            names, value = (parameter.human_readable_name or "").upper(), kind(parameter)
        yield code(names), value, default(parameter), plain(getattr(parameter, "help", "") or "")


def kind(parameter: Any) -> str:
    if hasattr(parameter.type, "choices"):
        return ", ".join(code(str(choice)) for choice in parameter.type.choices)
    return str(parameter.metavar or parameter.type.name)


def default(parameter: Any) -> str:
    value = parameter.default
    if value is None or value is False or callable(value) or value in ((), [], ""):
        return ""
    if not isinstance(value, str | int | float | bool):
        return code(str(getattr(value, "value", "")))
    return code(
        str(getattr(value, "value", value)).lower() if value is True else str(getattr(value, "value", value))
    )


def plain(text: str) -> str:
    """Returns the text without the markup of a terminal."""
    return _MARKUP.sub("", text.replace("\b\n", "").replace("\\[", "["))
