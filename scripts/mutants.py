"""How many small faults the unit tests find: changes one place of the product at a time, and runs the tests of that module.

    python scripts/mutants.py [--count 200] [--seed 1] [--jobs 1] [--packages policies,lb,skyserve_cli/controller,provisioners]

A mutant is one comparison, operator, condition, number or returned value that differs, in a copy of the checkout. The files of
tests/unit that import its module run, those first that name the function it is in, then those that import the fewest modules, until
one fails or a minute is over, as far as they pass without the change. Where none does, the files run that import a module that
imports it. Prints each mutant that survives, each whose tests took longer than a minute, the share that was found by package, and
those of which no test imports the module. Exit code 1 below `--least`.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("policies", "lb", "skyserve_cli/controller", "provisioners")
COPIED = (
    "policies",
    "lb",
    "skyserve_cli",
    "skyserve",
    "provisioners",
    "benchmarks",
    "scripts",
    "tests",
    "docs",
    "deploy",
    "examples",
)
LONGEST_S = 60.0
MOST_FILES = 12
MOST_STEPS = 2
SMALL = 10
FOUND, SURVIVES, LATE = "found", "survives", "takes longer than a minute"
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.BitOr: "&",
    ast.BitAnd: "|",
}


class Mutant(NamedTuple):
    """What stands at `line` of a module, and what is put there: characters from `start` to `end`, counted in its bytes."""

    path: str
    line: int
    start: int
    end: int
    before: str
    after: str
    inside: frozenset[str]  # the names of the functions and classes around it

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before} -> {self.after}"


def mutants_of(path: str, source: bytes) -> Iterator[Mutant]:
    """Yield every place of a module that can be changed, but for what type checkers alone look at."""
    lines = [0]
    for each in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(each))

    def place(node: ast.expr) -> tuple[int, int]:
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[operator]

    tree = ast.parse(source)
    around = [
        (node.lineno, node.end_lineno or node.lineno, node.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    for node in _running(tree):
        changed = _changed(node)
        if changed is None:
            continue
        start, end = place(node)
        before, at = source[start:end].decode(), node.lineno
        after = ast.unparse(changed)
        if before != after:
            inside = frozenset(name for first, last, name in around if first <= at <= last)
            yield Mutant(path, at, start, end, " ".join(before.split()), after, inside)


def _running(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that run: no annotations, no `TYPE_CHECKING`, no defaults of overloads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield from _expressions(node.value)
            continue
        if isinstance(node, ast.arguments | ast.arg):
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "dataclass":
            continue  # what frozen and slots change is no behaviour
        if isinstance(node, ast.expr):
            yield from _expressions(node)
            continue
        yield from _running(node)


def _expressions(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.JoinedStr):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from _expressions(child)
        elif isinstance(child, ast.comprehension | ast.keyword):
            for inner in ast.iter_child_nodes(child):
                if isinstance(inner, ast.expr):
                    yield from _expressions(inner)


def _changed(node: ast.expr) -> ast.expr | None:
    """Return the expression with a fault; None if there is none for it."""
    match node:
        case ast.Compare(ops=[one], left=left, comparators=[right]) if type(one) in COMPARISONS:
            return ast.parse(
                f"({ast.unparse(left)}) {COMPARISONS[type(one)]} ({ast.unparse(right)})", mode="eval"
            ).body
        case ast.BoolOp(op=ast.And(), values=values):
            return ast.BoolOp(ast.Or(), values)
        case ast.BoolOp(op=ast.Or(), values=values):
            return ast.BoolOp(ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.BinOp(op=ast.BitOr(), right=ast.Constant(value=None)):
            return None  # a type
        case ast.BinOp(op=one, left=left, right=right) if type(one) in OPERATORS and not _is_text(
            left, right
        ):
            return ast.parse(
                f"({ast.unparse(left)}) {OPERATORS[type(one)]} ({ast.unparse(right)})", mode="eval"
            ).body
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return ast.IfExp(test, orelse, body)
        case ast.Constant(value=bool() as value):
            return ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            return ast.Constant(value + 1 if abs(value) < SMALL else 2 * value)  # 7,201 s are two hours, too
    return None


def _is_text(*sides: ast.expr) -> bool:
    return any(isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes)) for side in sides)  # fmt: skip


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def imports_of_test(path: Path) -> set[str]:
    """Return what a test imports, and what the helpers do that it imports."""
    names, looked_at = imports_of(path), set[str]()
    while helpers := {name for name in names if name.startswith("tests.")} - looked_at:
        looked_at |= helpers
        for name in helpers:
            helper = ROOT / f"{name.replace('.', '/')}.py"
            names |= imports_of(helper) if helper.exists() else set()
    return names


def tests_by_module(packages: list[str]) -> dict[str, list[str]]:
    """Return the files of unit tests that import a module, or else one that imports it.

    Those come first that import it themselves, then those that import the fewest.
    """
    found, own = defaultdict(set), {}
    for path in (ROOT / "tests/unit").glob("test_*.py"):
        file = str(path.relative_to(ROOT))
        own[file] = imports_of(path)
        for name in imports_of_test(path):
            found[name].add(file)
    paths = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    importers = {module_of(str(path.relative_to(ROOT))): imports_of(path) for path in paths}
    for _ in range(MOST_STEPS):
        direct = {name: set(files) for name, files in found.items()}
        for name in importers.keys() - direct.keys():
            for importer, imported in importers.items():
                if name in imported:
                    found[name] |= direct.get(importer, set())
        found = defaultdict(set, {name: files for name, files in found.items() if files})
    return {
        name: sorted(files, key=lambda file: (name not in own[file], len(own[file]), file))
        for name, files in found.items()
    }


def ordered(files: list[str], mutant: Mutant) -> list[str]:
    """Return those first that name most of what the mutant is in."""

    def named(file: str) -> int:
        words = set(re.findall(r"\w+", (ROOT / file).read_text()))
        return len(mutant.inside & words)

    return sorted(files, key=named, reverse=True)[:MOST_FILES]


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Checkout:
    """A copy in which one module at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "hatch_build.py", "README.md"):
            shutil.copy(ROOT / name, folder / name)
        compileall.compile_dir(folder, quiet=2)
        self._sound: dict[str, bool] = {}

    def result(self, mutant: Mutant, files: list[str]) -> str:
        """Return FOUND, SURVIVES or LATE."""
        sound = [file for file in ordered(files, mutant) if self._is_sound(file)]
        path = self._folder / mutant.path
        source, times = path.read_bytes(), path.stat()
        try:
            path.write_bytes(source[: mutant.start] + f"({mutant.after})".encode() + source[mutant.end :])
            return self._result(sound)
        finally:
            path.write_bytes(source)
            # What is compiled is of this source: it is used again.
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _is_sound(self, file: str) -> bool:
        if file not in self._sound:
            self._sound[file] = self._result([file]) == SURVIVES
        return self._sound[file]

    def _result(self, files: list[str]) -> str:
        """A mutant that never ends is stopped by pytest's own time limit, and found."""
        if not files:
            return SURVIVES
        options = [
            "-q",
            "-x",
            "-n0",
            "-p",
            "no:cacheprovider",
            "--timeout",
            "20",
            "--hypothesis-profile=quick",
        ]
        command = [sys.executable, "-B", "-m", "pytest", *options, *files]
        try:
            done = subprocess.run(
                command, cwd=self._folder, timeout=LONGEST_S, capture_output=True, check=False
            )
        except subprocess.TimeoutExpired:
            return LATE
        return SURVIVES if done.returncode == 0 else FOUND


def drawn(packages: list[str], count: int, seed: int) -> list[Mutant]:
    """Return as many mutants of each package, whatever its size."""
    rng, found = random.Random(seed), []
    for package in packages:
        places = [
            mutant
            for path in sorted((ROOT / package).rglob("*.py"))
            for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_bytes())
        ]
        found += rng.sample(places, min(len(places), -(-count // len(packages))))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--packages", default=",".join(PACKAGES))
    parser.add_argument("--least", type=float, default=0.85)
    given = parser.parse_args()
    packages = given.packages.split(",")
    tests = tests_by_module(packages)
    mutants = drawn(packages, given.count, given.seed)
    untested = [mutant for mutant in mutants if module_of(mutant.path) not in tests]
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(given.jobs) as pool:
        checkouts = [Checkout(Path(scratch) / str(number)) for number in range(given.jobs)]
        shares = [
            (checkouts[number], [one for one in mutants if one not in untested][number :: given.jobs])
            for number in range(given.jobs)
        ]

        def tried(share: tuple[Checkout, list[Mutant]]) -> None:
            for mutant in share[1]:
                result = share[0].result(mutant, tests[module_of(mutant.path)])
                package = next(one for one in given.packages.split(",") if mutant.path.startswith(f"{one}/"))
                counts[package][0] += result == FOUND
                counts[package][1] += 1
                if result != FOUND:
                    print(f"{result}: {mutant}", flush=True)

        list(pool.map(tried, shares))
    for package, (found, count) in sorted(counts.items()):
        print(f"{package}: {found} of {count} found")
    for mutant in untested:
        print(f"no unit test imports it: {mutant}")
    found, count = (sum(column) for column in zip(*counts.values(), strict=True))
    print(f"{found / count:.1%} of {count}, and {len(untested)} in modules that no unit test imports")
    return 0 if found >= given.least * count else 1


if __name__ == "__main__":
    sys.exit(main())
