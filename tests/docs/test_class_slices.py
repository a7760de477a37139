"""A class is not cut into bases that only one subclass has: an object owns its parts instead of inheriting them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("policies", "lb", "provisioners", "skyserve", "skyserve_cli")

#: Bases with one subclass, and why they are bases.
ALLOWED = {
    "AlternativeSection": "pydantic makes the entries of `any_of` and `ordered` of it",
}


class Class(NamedTuple):
    name: str
    bases: tuple[str, ...]
    is_abstract: bool


def classes(tree: ast.Module) -> Iterator[Class]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = tuple(ast.unparse(base).split("[")[0].rsplit(".", 1)[-1] for base in node.bases)
            abstract = any(
                "abstractmethod" in ast.unparse(decorator)
                for method in node.body
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
                for decorator in method.decorator_list
            )
            yield Class(node.name, bases, abstract or bool({"Protocol", "ABC"} & set(bases)))


def made(tree: ast.Module) -> Iterator[str]:
    """Yield the names of which something is called, or that are passed on as values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for one in (node.func, *node.args, *(keyword.value for keyword in node.keywords)):
                if isinstance(one, ast.Name):
                    yield one.id
                elif isinstance(one, ast.Attribute):
                    yield one.attr


def slices(sources: Iterable[str]) -> set[str]:
    """Return the classes that have one subclass and no instance, and are neither abstract nor exceptions."""
    trees = [ast.parse(source) for source in sources]
    found = [one for tree in trees for one in classes(tree)]
    instances = {name for tree in trees for name in made(tree)}
    subclasses: dict[str, list[str]] = defaultdict(list)
    for one in found:
        for base in one.bases:
            subclasses[base].append(one.name)
    return {
        one.name
        for one in found
        if len(subclasses[one.name]) == 1
        and not one.is_abstract
        and one.name not in instances
        and not any(base.endswith(("Error", "Exception")) for base in (one.name, *one.bases))
    }


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("class A: ...\nclass B(A): ...", {"A"}),
        ("class A: ...\nclass B(A): ...\nclass C(B): ...", {"A", "B"}),
        ("class A: ...\nclass B(A): ...\nclass C(A): ...", set()),
        ("class A: ...\nclass B(A): ...\na = A()", set()),
        ("class A(Protocol): ...\nclass B(A): ...", set()),
        ("class A:\n    @abstractmethod\n    def f(self): ...\nclass B(A): ...", set()),
        ("class AError(Exception): ...\nclass BError(AError): ...", set()),
        ("class A(Generic[T]): ...\nclass B(A[int]): ...", {"A"}),
    ],
    ids=[
        "a slice",
        "two slices",
        "two subclasses",
        "has an instance",
        "a protocol",
        "an abstract class",
        "an exception",
        "a generic slice",
    ],
)
def test_a_slice_is_a_base_with_one_subclass_and_no_instance(source: str, expected: set[str]) -> None:
    assert slices([source]) == expected


def test_no_class_of_the_product_is_cut_into_slices() -> None:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 500
    found = slices(path.read_text() for path in files)
    assert not found - ALLOWED.keys(), "let the class own its parts, or say in ALLOWED why it is a base"
