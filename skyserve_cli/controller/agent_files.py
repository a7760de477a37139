"""The files and names from which the launch order of a load balancer agent's machine is built."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

TOKEN_VARIABLE = "SKYSERVE_LB_TOKEN"  # noqa: S105 (a name, not a token)


def package_folder(package: str) -> Path:
    """Return the folder of an installed package, without importing it. Raises ModuleNotFoundError."""
    found = find_spec(package)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(package)
    return Path(found.origin).parent


def supervisor_file() -> str:
    """Return the path of the supervisor script that an agent's machine runs."""
    return str(package_folder("lb") / "agent" / "supervisor.py")
