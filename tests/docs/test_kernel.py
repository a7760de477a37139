"""The controller's kernel: what a daemon without parts imports, and how many values constructors take."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from skyserve_cli.controller.part import BUILT_IN, Part

ROOT = Path(__file__).parents[2]
MOST_LINES = 33_000
MOST_PARAMETERS = 9
IMPORTED = """
import json, sys
import skyserve_cli.controller.daemon
print(json.dumps({name: module.__file__ for name, module in sys.modules.items() if getattr(module, "__file__", None)}))
"""
OURS = ("policies", "lb", "provisioners", "skyserve", "skyserve_cli")


def of_the_kernel() -> dict[str, Path]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    found = json.loads(done.stdout)
    return {name: Path(file) for name, file in found.items() if name.partition(".")[0] in OURS}


def test_a_daemon_without_parts_imports_the_kernel_alone() -> None:
    modules = of_the_kernel()
    parts = {place.partition(":")[0] for place in BUILT_IN}
    folders = {name.removesuffix(".part") for name in parts if name.endswith(".part")}
    assert not [name for name in modules if name in parts or name.rpartition(".")[0] in folders]
    clouds = tuple(f"provisioners.{name}." for name in ("aws", "azure", "gcp", "lambda_labs", "local", "ssh"))
    assert not [name for name in modules if name.startswith(clouds)]
    lines = sum(len(file.read_bytes().splitlines()) for file in modules.values())
    print(f"{len(modules)} modules, {lines} lines")
    assert lines <= MOST_LINES


def test_parts_are_found_by_name() -> None:
    kinds = [getattr(import_module(place.partition(":")[0]), place.partition(":")[2]) for place in BUILT_IN]
    assert all(issubclass(kind, Part) for kind in kinds)
    assert len({kind.name for kind in kinds}) == len(BUILT_IN)


def constructors(folder: Path) -> Iterator[tuple[int, str]]:
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    given = method.args
                    count = len((*given.posonlyargs, *given.args, *given.kwonlyargs)) - 1
                    yield count, f"{path.relative_to(ROOT)}: {node.name}"  # type: ignore[attr-defined]


def test_constructors_of_the_controller_take_few_values() -> None:
    found = list(constructors(ROOT / "skyserve_cli" / "controller"))
    assert len(found) > 50
    assert not [one for one in found if one[0] > MOST_PARAMETERS]
