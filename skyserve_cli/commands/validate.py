"""`serve validate`: everything that is wrong with a file, at once and by its path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from skyserve_cli.commands import files
from skyserve_cli.commands.options import Env, EnvFile, Format, OutputFormat, Secret, SecretFile, Set
from skyserve_cli.output import CommandFailed, WrongUsage, inform, put, put_json
from skyserve_cli.spec import SpecError, spec_to_json
from skyserve_cli.spec.editor_schema import json_schema
from skyserve_cli.spec.yaml_tree import key_lines, line_of


def validate(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="The service file (YAML).")] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of service files, for editors.")
    ] = False,
    env: Env = None,
    env_file: EnvFile = None,
    secret: Secret = None,
    secret_file: SecretFile = None,
    changes: Set = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Check a service file without launching anything.

    Needs no cloud and no secrets: missing ones are a warning. Each line starts with FILE:LINE. With -o json an
    object: `valid`, the `problems` and `warnings` with their paths and lines, and the `spec` as understood.
    """
    if schema:
        put_json(json_schema())
        return
    if file is None:
        raise WrongUsage("name a service file, or pass --schema")
    try:
        loaded = files.read(
            file,
            env=env,
            env_file=env_file,
            secret=secret,
            secret_file=secret_file,
            changes=changes,
            to_run=False,
        )
    except SpecError as error:
        lines = _lines(file)
        if output is OutputFormat.JSON:
            problems = [
                {"path": p.path, "message": p.message, "hint": p.hint, "line": line_of(p.path, lines)}
                for p in error.problems
            ]
            put_json({"valid": False, "problems": problems, "warnings": [], "spec": None})
        lines_of_problems = [f"{_place(file, each.path, lines)}: {each}" for each in error.problems]
        raise CommandFailed("\n".join(lines_of_problems), 2) from None
    lines = _lines(file) if loaded.warnings else {}
    for warning in loaded.warnings:
        inform(f"{_place(file, warning.path, lines)}: warning: {warning}")
    if output is OutputFormat.JSON:
        warnings = [
            {"path": w.path, "message": w.message, "line": line_of(w.path, lines)} for w in loaded.warnings
        ]
        put_json({"valid": True, "problems": [], "warnings": warnings, "spec": spec_to_json(loaded.spec)})
    else:
        put(f"{file} is right: service {loaded.spec.name}")


def _lines(file: Path) -> Mapping[str, int]:
    try:
        return key_lines(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return {}


def _place(file: Path, path: str, lines: Mapping[str, int]) -> str:
    """``FILE:LINE`` as editors and CI systems read it."""
    line = line_of(path, lines)
    return str(file) if line is None else f"{file}:{line}"
