"""Modules that a wheel has compiled use nothing that a compiled class does not have.

`scripts/test_native.sh` runs the tests of the load balancer on the compiled modules.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from lb.http.head_lines import KnownHead
from lb.http.request_head import RequestHead
from lb.http.response_head import ResponseHead
from scripts.narrowed_reads import narrowed_reads

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


@pytest.mark.parametrize("module", list(modules()))
def test_nothing_is_read_for_what_it_was_before_a_call(module: str) -> None:
    assert narrowed_reads((ROOT / module).read_text()) == []


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        pytest.param(["self.x = None", "self.open()", "return self.x"], ["self.x"], id="assigned"),
        pytest.param(["y, self.x = self.x, None", "open(y)", "return self.x"], ["self.x"], id="one of several"),
        pytest.param(["if self.x is None:", "    self.open()", "    self.x.read()"], ["self.x"], id="tested"),
        pytest.param(["if self.x:", "    return", "self.x = None", "if self.open():", "    self.x.read()"], ["self.x"], id="called by a test"),
        pytest.param(["self.x = None", "while self.x is None:", "    self.open()"], ["self.x"], id="the next round"),
        pytest.param(["self.a.x = None", "await self.open()", "return self.a.x"], ["self.a.x"], id="of an attribute"),
        pytest.param(["if self.x is not None:", "    self.x.close()", "    if self.x is None:", "        pass"], ["self.x"], id="closed by a call"),
        pytest.param(["self.x = None", "try:", "    self.open()", "finally:", "    self.x.read()"], ["self.x"], id="in any case"),
        pytest.param(["self.x = None", "if self.x is None:", "    self.open()"], [], id="no call yet"),
        pytest.param(["self.x = None", "self.x = open()", "return self.x"], [], id="assigned again"),
        pytest.param(["self.x = None", "self = open()", "return self.x"], [], id="of another object"),
        pytest.param(["if self.y:", "    self.x = None", "self.open()", "return self.x"], [], id="on one way only"),
        pytest.param(["while self.x is None:", "    self.open()", "return self.x"], [], id="a loop that ends with it"),
        pytest.param(["self.x = None", "return", "self.open(self.x)"], [], id="never reached"),
        pytest.param(["if self.x is not None:", "    self.x.read()", "    self.x.close()"], [], id="no test after the call"),
    ],
)  # fmt: skip
def test_a_read_that_a_compiler_takes_for_none_is_found(lines: list[str], found: list[str]) -> None:
    source = "async def f(self):\n" + "".join(f"    {line}\n" for line in lines)
    assert [name for _, name in narrowed_reads(source)] == found


def fields(one: KnownHead) -> dict[str, object]:
    """Return what was read of a head. Its bytes are not among it: a copy has others, so it cannot be compared by them."""
    names = [name for name in dir(type(one)) if not name.startswith("_") and name not in ("before", "after")]
    return {name: getattr(one, name) for name in names if not callable(getattr(type(one), name))}


def test_a_copy_of_a_head_has_all_of_its_fields() -> None:
    head = RequestHead()
    for name in fields(head):
        setattr(head, name, {} if name == "ours" else name.encode())
    head.before = b"of the head that was read"
    assert fields(head.with_values(b"", b"", b"")) == fields(head)
    assert head.with_values(b"", b"", b"").end_in(head.before) == -1
    assert fields(head.without(b"x-nothing")) == fields(head)
    head.lines = b"a: b\r\ntraceparent: traceparent\r\n"
    other = head.with_values(b"id", b"age=1", b"new")
    assert fields(other) == {
        **fields(head), "request_id": b"id", "ours": {b"hop": b"age=1"},
        "traceparent": b"new", "lines": b"a: b\r\ntraceparent: new\r\n",
    }  # fmt: skip


def test_a_copy_of_a_head_of_a_response_has_all_of_its_fields() -> None:
    head = ResponseHead()
    for name in fields(ResponseHead()):
        setattr(head, name, f"set {name}")
    head.before = b"of the head that was read"
    assert fields(head.with_credit(b"1-2")) == {**fields(head), "credit": b"1-2"}
    assert head.with_credit(b"1-2").end_in(head.before) == -1
