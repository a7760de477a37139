"""Modules that a wheel has compiled use nothing that a compiled class does not have.

`scripts/test_native.sh` runs the tests of the load balancer on the compiled modules, which takes too long for every change.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from lb.http.request_head import RequestHead
from lb.http.response_head import ResponseHead

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
try:
    from hatch_build import modules
finally:
    sys.path.remove(str(ROOT))

#: A native class keeps its fields in its own layout, and its instances are not weakly referenced.
ABSENT = frozenset(("__dict__", "__weakref__"))


@pytest.mark.parametrize("module", list(modules()))
def test_nothing_is_read_that_a_compiled_class_lacks(module: str) -> None:
    tree = ast.parse((ROOT / module).read_text())
    found = [
        f"{module}:{node.lineno}"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in ABSENT)
        or (isinstance(node, ast.Name) and node.id in ("vars", "weakref"))
    ]
    assert found == []


def fields(one: object) -> dict[str, object]:
    names = [name for name in dir(type(one)) if not name.startswith("_")]
    return {name: getattr(one, name) for name in names if not callable(getattr(type(one), name))}


def test_a_copy_of_a_head_has_all_of_its_fields() -> None:
    head = RequestHead()
    for name in fields(head):
        setattr(head, name, {} if name == "ours" else name.encode())
    assert fields(head.with_values(b"", b"")) == fields(head)
    assert fields(head.without(b"x-nothing")) == fields(head)
    other = head.with_values(b"id", b"age=1")
    assert fields(other) == {**fields(head), "request_id": b"id", "ours": {b"hop": b"age=1"}}


def test_a_copy_of_a_head_of_a_response_has_all_of_its_fields() -> None:
    head = ResponseHead()
    for name in fields(ResponseHead()):
        setattr(head, name, f"set {name}")
    assert fields(head.with_credit(b"1-2")) == {**fields(head), "credit": b"1-2"}
