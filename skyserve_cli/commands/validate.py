"""`serve validate`: everything that is wrong with a file, at once and by its path."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skyserve_cli.commands import files
from skyserve_cli.commands.options import Env, EnvFile, Format, Output, Secret, SecretFile, Set
from skyserve_cli.output import WrongUsage, put, put_json
from skyserve_cli.spec import SpecError, json_schema, spec_to_json


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
    output: Format = Output.TABLE,
) -> None:
    """Check a service file without launching anything.

    With -o json an object: `valid`, the `problems` and `warnings` with their paths, and the `spec` as understood.
    """
    if schema:
        put_json(json_schema())
        return
    if file is None:
        raise WrongUsage("name a service file, or pass --schema")
    try:
        loaded = files.load(
            file, env=env, env_file=env_file, secret=secret, secret_file=secret_file, changes=changes
        )
    except SpecError as error:
        if output is Output.JSON:
            problems = [{"path": p.path, "message": p.message, "hint": p.hint} for p in error.problems]
            put_json({"valid": False, "problems": problems, "warnings": [], "spec": None})
        raise
    if output is Output.JSON:
        warnings = [{"path": w.path, "message": w.message} for w in loaded.warnings]
        put_json({"valid": True, "problems": [], "warnings": warnings, "spec": spec_to_json(loaded.spec)})
    else:
        put(f"{file} is right: service {loaded.spec.name}")
