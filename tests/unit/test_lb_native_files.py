"""A machine checks native files by loading them, and does without those that do not load."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from lb.agent.native_files import NOTE, main, native_files
from lb.config.stats import MAX_REASON
from skyserve_cli.controller.agent_files import package_folder

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
MODULE = """
#include <Python.h>
static struct PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "{name}", NULL, -1, NULL}};
PyMODINIT_FUNC PyInit_{name}(void) {{ {first} return PyModule_Create(&definition); }}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the package, as on a machine."""
    for package in ("lb", "policies"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(package_folder(package), tmp_path / package, ignore=ignored)
    return tmp_path


def compiled(folder: Path, path: str, first: str = "") -> Path:
    name = path.rpartition("/")[2]
    source = folder / "module.c"
    source.write_text(MODULE.format(name=name, first=first))
    target = folder / f"{path}{SUFFIX}"
    include = sysconfig.get_path("include")
    done = subprocess.run(
        ["cc", "-shared", "-fPIC", f"-I{include}", source, "-o", target], capture_output=True
    )
    if done.returncode:
        pytest.skip("no C compiler, or no headers of Python")
    return target


def test_files_that_load_stay(folder: Path) -> None:
    files = [compiled(folder, "lb/proxy/_fast_path"), compiled(folder, "lb/core/tokens_of")]
    main([str(folder)])
    assert set(native_files(folder)) == set(files)
    assert not (folder / NOTE).exists()


@pytest.mark.parametrize(
    ("first", "why"),
    [
        ('PyErr_SetString(PyExc_ImportError, "GLIBC_2.99 not found"); return NULL;', "ImportError: GLIBC_2.99 not found"),
        ("abort();", "exit code -6"),
    ],
    ids=["raises", "crashes"],
)  # fmt: skip
def test_one_module_that_does_not_load_takes_all_with_it_but_the_helper(
    folder: Path, first: str, why: str
) -> None:
    helper = compiled(folder, "lb/proxy/_fast_path")
    compiled(folder, "lb/core/good")
    compiled(folder, "lb/core/bad", first)
    compiled(folder, "skyserve_lb__mypyc")
    main([str(folder)])
    assert native_files(folder) == [helper]
    note = (folder / NOTE).read_text()
    assert note == f"the native modules cannot be loaded there: {why}\n"
    assert len(note) <= MAX_REASON


def test_a_broken_helper_leaves_the_modules_and_the_reason_of_the_controller(folder: Path) -> None:
    good = compiled(folder, "lb/core/good")
    (folder / "lb" / "proxy" / f"_fast_path{SUFFIX}").write_bytes(b"not a library")
    (folder / NOTE).write_text("from the controller\n")
    main([str(folder)])
    assert native_files(folder) == [good]
    note = (folder / NOTE).read_text()
    assert note.startswith("the C helper cannot be loaded there: ImportError: ")
    assert note.endswith("; from the controller\n")


def test_files_of_another_python_are_said_to_be_that(folder: Path) -> None:
    (folder / "lb" / "core" / "targets.cpython-39-sparc-linux-gnu.so").write_bytes(b"")
    main([str(folder)])
    assert native_files(folder) == []
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert f"they are not for CPython {version}" in (folder / NOTE).read_text()


def test_it_runs_with_what_an_oldest_machine_has(folder: Path) -> None:
    """It must not import what may be broken: neither a library nor another module of the agent."""
    script = "import sys, lb.agent.native_files; print([n for n in sys.modules if n.startswith('lb.')])"
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "['lb.agent', 'lb.agent.native_files']"
