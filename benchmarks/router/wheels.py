"""Programs from wheels: each in a virtual environment of its own in the cache folder, installed when it is first needed."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.router.machine import Missing, cache_folder


def installed(package: str, version: str) -> tuple[Path, str]:
    """Return the virtual environment and the version in it: the pinned one, else the latest. Raises Missing."""
    folder = cache_folder() / "venvs" / f"{package}-{version}"
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    if not stamp.exists():
        print(f"installing {package}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for wanted in (f"{package}=={version}", package):
            done = subprocess.run([*pip, wanted], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break
        else:
            raise Missing(f"{package} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        program = f"from importlib.metadata import version; print(version({package!r}))"
        stamp.write_text(
            subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout
        )
    return folder, stamp.read_text().strip()
