"""Commands that compute say what is missing where SciPy is not installed; the others need neither it nor Matplotlib."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("scipy", "matplotlib"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in ("scipy", "matplotlib") else found(name)
from skyserve_cli.app import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["simulate"], "serve simulate"),
        (["profile", "http://127.0.0.1:1"], "serve profile"),
        (["report", "chat", "--out", "a.png"], "--out"),
        (["simulate", "--list-policies"], ""),
    ],
)
def test_without_the_extra(words: list[str], what: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, *words],
        env={"SKYSERVE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    needed = (
        f"{what} needs SciPy and Matplotlib: install the extra `simulate`, e.g. pip install '.[simulate]'\n"
    )
    assert (done.returncode, done.stderr) == ((2, needed) if what else (0, ""))
