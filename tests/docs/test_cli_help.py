"""The help is true, and costs nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import pytest
import typer

from skyserve_cli.app import EXIT_CODES, VERBS, build, exit_code
from skyserve_cli.output import CommandFailed

FAMILIES = [name for name, verb in VERBS.items() if verb.family]
HEAVY = ("skyserve_cli.engine", "skyserve_cli.sim", "sqlalchemy", "aiohttp", "boto3", "google", "azure")
#: Commands that only read need none of these either. Reads of a running controller: tests/e2e/test_cli_imports.py.
OF_PLANS = ("skyserve_cli.spec", "skyserve_cli.state", "policies", "pydantic", "cryptography", "asyncio")


@pytest.mark.parametrize("name", VERBS)
def test_the_line_in_the_list_is_the_first_line_of_the_verbs_own_help(name: str) -> None:
    command = typer.main.get_command(build(name))
    told = command.commands[name].help  # type: ignore[attr-defined]
    assert told.splitlines()[0] == VERBS[name].line


@pytest.mark.parametrize("name", [name for name in VERBS if name not in FAMILIES])
def test_every_option_says_what_it_does(name: str) -> None:
    command = typer.main.get_command(build(name)).commands[name]  # type: ignore[attr-defined]
    silent = [p.name for p in command.params if p.param_type_name == "option" and not p.help]
    assert silent == []


@pytest.mark.parametrize("name", EXIT_CODES)
def test_every_error_with_an_exit_code_exists(name: str) -> None:
    module, _, kind = name.rpartition(".")
    assert issubclass(getattr(import_module(module), kind), Exception)


def test_an_error_nobody_expected_keeps_its_traceback() -> None:
    assert exit_code(KeyError("x")) is None
    assert CommandFailed("x").code == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "heavy"),
    [
        ("--help", HEAVY + OF_PLANS),
        ("status", HEAVY + OF_PLANS),
        ("events", HEAVY + OF_PLANS),
        ("logs --controller", HEAVY + OF_PLANS),
        ("status --help", HEAVY + OF_PLANS),
        ("controller status", HEAVY),
        ("up --help", HEAVY),
    ],
)
def test_asking_loads_nothing_heavy(line: str, heavy: tuple[str, ...], tmp_path: object) -> None:
    script = (
        "import json, sys; from skyserve_cli.app import run; run(json.loads(sys.argv[1]));"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(line.split())],
        capture_output=True,
        text=True,
        env={"SKYSERVE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        timeout=60,
    )
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert [m for m in loaded if m in heavy or m.startswith(tuple(f"{name}." for name in heavy))] == []
