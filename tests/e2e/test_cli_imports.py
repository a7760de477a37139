"""Commands that only read a running controller import little: each module costs CPU in every call of a script or a prompt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

SLEEPER = "service: {}\nresources: {infra: local}\nrun: exec python3 -m http.server $SKYSERVE_REPLICA_PORT\n"
LOADED = (
    "import json, sys; from skyserve_cli.app import run; code = run(sys.argv[1:]);"
    "print(); print(json.dumps([code, sorted(sys.modules)]))"
)
#: No command that reads the controller needs these.
HEAVY = frozenset(
    [
        "aiohttp",
        "alembic",
        "asyncio",
        "asyncssh",
        "azure",
        "boto3",
        "cryptography",
        "google",
        "lb",
        "numpy",
        "paramiko",
        "policies",
        "prometheus_client",
        "pydantic",
        "scipy",
        "skyserve_cli.clouds",
        "skyserve_cli.engine",
        "skyserve_cli.sim",
        "skyserve_cli.spec",
        "skyserve_cli.state",
        "sqlalchemy",
        "uvloop",
        "yaml",
    ]
)
WITHOUT_TABLES = HEAVY | {"rich"}
#: Nor does one that plans with the catalog.
SDKS = frozenset(
    ["aiohttp", "azure", "boto3", "botocore", "google", "numpy", "paramiko", "scipy", "sqlalchemy"]
)


def heavy(serve: Any, modules: frozenset[str], *arguments: str) -> list[str]:
    """Which of `modules`, or of what is in them, this command imports. The command must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments],
        env=serve.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    code, loaded = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    inside = tuple(f"{name}." for name in modules)
    return [name for name in loaded if name in modules or name.startswith(inside)]


def test_commands_that_read_a_running_controller_import_nothing_heavy(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "web.yaml"
    file.write_text(SLEEPER)
    serve.ok("up", file, "-y")
    found = {
        "status": heavy(serve, HEAVY, "status"),
        "status -o wide": heavy(serve, HEAVY, "status", "web", "-o", "wide"),
        "status -o json": heavy(serve, WITHOUT_TABLES, "status", "-o", "json"),
        "status --endpoint": heavy(serve, WITHOUT_TABLES, "status", "web", "--endpoint"),
        "logs": heavy(serve, WITHOUT_TABLES, "logs", "web", "--no-follow"),
        "logs --load-balancer": heavy(serve, WITHOUT_TABLES, "logs", "web", "--load-balancer"),
        "events": heavy(serve, WITHOUT_TABLES, "events"),
        "controller status": heavy(serve, HEAVY, "controller", "status"),
        "controller start": heavy(serve, HEAVY, "controller", "start"),
        "events NAME": heavy(serve, WITHOUT_TABLES, "events", "web", "--since", "1h", "-o", "json"),
    }
    assert found == {command: [] for command in found}


def test_what_reads_the_catalog_imports_no_client_of_a_cloud(serve: Any, tmp_path: Path) -> None:
    azure = {"subscription_id": "00000000-0000-0000-0000-000000000000"}
    serve.configure(clouds={"aws": {}, "gcp": {}, "azure": azure, "local": {}})
    file = tmp_path / "chat.yaml"
    file.write_text("service: {}\nresources: {accelerators: {A100: 1, L4: 1}}\nrun: serve\n")
    assert heavy(serve, SDKS, "plan", str(file)) == []
    assert heavy(serve, SDKS, "catalog", "--limit", "1") == []


def test_a_controller_with_nothing_to_do_imports_no_client_of_a_cloud_and_no_migrations(serve: Any) -> None:
    serve.ok("controller", "start")
    serve.ok("controller", "stop")
    code = "import json, sys; import skyserve_cli.controller.daemon; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = json.loads(done.stdout)
    heavy = (
        "alembic",
        "asyncssh",
        "azure",
        "boto3",
        "google",
        "kubernetes",
        "mako",
        "numpy",
        "paramiko",
        "scipy",
        "typer",
    )
    assert [name for name in heavy if name in loaded] == []
