"""The host agent as one file: everything it imports is in it, and its grammar is that of Python 3.8."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from provisioners.remote.host_agent.bundle import agent_bundle

IMPORT_ALL = """
import importlib, sys, zipfile
sys.path.insert(0, sys.argv[1])
for name in zipfile.ZipFile(sys.argv[1]).namelist():
    if name.endswith(".py") and name != "__main__.py":
        importlib.import_module(name[:-3].replace("/", ".").replace(".__init__", ""))
ours = [m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] in ("provisioners", "policies", "skyserve_cli")]
assert ours and all(file.startswith(sys.argv[1]) for file in ours), ours
"""


def test_it_imports_nothing_of_the_product_but_itself(tmp_path: Path) -> None:
    bundle = tmp_path / "agent.pyz"
    bundle.write_bytes(agent_bundle())
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", IMPORT_ALL, str(bundle)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_its_grammar_is_of_python_3_8() -> None:
    with ZipFile(io.BytesIO(agent_bundle())) as bundle:
        for name in [name for name in bundle.namelist() if name.endswith(".py")]:
            ast.parse(bundle.read(name), name, feature_version=(3, 8))
