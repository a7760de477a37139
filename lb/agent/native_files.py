"""Checks on a machine that the native files of a copy of this package load there, and removes those that do not.

    python -m lb.agent.native_files FOLDER

`FOLDER` has the packages. Native files come from another machine, so only loading them shows whether they fit. The Python modules beside
them behave the same: without the native ones the agent is slower, and starts. The reason is left for `lb.agent.build_kind`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

NOTE = "lb/_not_compiled.txt"
LOAD_TIMEOUT_S = 120.0
HELPER = "_fast_path."
GROUP = "skyserve_lb__mypyc"

_LOAD = """import importlib, sys
for name in sys.argv[1:]:
    if not importlib.import_module(name).__file__.endswith(".so"):
        sys.exit(f"they are not for CPython {sys.version_info[0]}.{sys.version_info[1]}")
"""


def native_files(folder: Path) -> list[Path]:
    """Return the native files of the packages in a folder: the modules, and the library that they share."""
    found = [path for package in ("lb", "policies") for path in (folder / package).rglob("*.so")]
    return sorted([*folder.glob(f"{GROUP}.*.so"), *found])


def settle(folder: Path) -> list[str]:
    """Remove what does not load; return why, one sentence each."""
    files = native_files(folder)
    helper = [path for path in files if path.name.startswith(HELPER)]
    modules = [path for path in files if path not in helper]  # they call each other: all of them, or none
    problems = []
    for what, group in (("the C helper", helper), ("the native modules", modules)):
        why = _why_not(folder, group)
        if why:
            for path in group:
                path.unlink()
            problems.append(f"{what} cannot be loaded there: {why}")
    return problems


def _why_not(folder: Path, files: Sequence[Path]) -> str:
    """Return why the files cannot be loaded; empty if they can."""
    names = [".".join((*path.relative_to(folder).parts[:-1], path.name.partition(".")[0])) for path in files]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOAD, *names],
            env={**os.environ, "PYTHONPATH": str(folder)},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=LOAD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"it takes more than {LOAD_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0]).resolve()
    problems = settle(folder)
    if problems:
        note = folder / NOTE
        before = [note.read_text(encoding="utf-8").strip()] if note.exists() else []
        note.write_text("; ".join([*problems, *before]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
