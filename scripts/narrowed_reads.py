"""Reads that compiled modules get wrong: of an attribute that a call may have changed since a test or an assignment of None.

mypy takes the type that an attribute has after `self.x = None`, or after a test of it, for the type that it has until the
function assigns it again, whatever is called in between. mypyc compiles a read by that type, and a read of another value
raises TypeError, where interpreted code goes on. So in a compiled module, no function

- reads an attribute that it has set to None, or found to be None, when it has called something since;
- tests whether an attribute is None that it has found not to be, when it has called something since.

    python -m scripts.narrowed_reads MODULE.py…

Write such a function so that the call returns what has become of it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_CALLS = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom)


class Narrowed(NamedTuple):
    """What mypy takes an attribute for. `called` if something was called since it was so."""

    is_none: bool
    called: bool = False


#: By the attribute's expression, such as `self.x`; None behind a statement that leaves the block.
State = dict[str, Narrowed] | None


def _join(*states: State) -> State:
    """Where two ways meet, an attribute has the type that it has on both."""
    reached = [state for state in states if state is not None]
    if not reached:
        return None
    joined: dict[str, Narrowed] = {}
    for name, here in reached[0].items():
        each = [state.get(name) for state in reached]
        if all(one is not None and one.is_none == here.is_none for one in each):
            joined[name] = Narrowed(here.is_none, any(one is not None and one.called for one in each))
    return joined


class _Function:
    """One function's walk, in order of execution. Loops are walked twice, for what their end does to their beginning."""

    def __init__(self) -> None:
        self.found: set[tuple[int, str]] = set()
        self._loops: list[tuple[list[State], list[State]]] = []  # states at `continue` and at `break`

    # --- statements

    def block(self, body: Iterable[ast.stmt], state: State) -> State:
        for statement in body:
            if state is None:
                return None
            state = self._statement(statement, dict(state))
        return state

    def _statement(self, node: ast.stmt, state: dict[str, Narrowed]) -> State:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return state
            case ast.If():
                then, other = self._test(node.test, state)
                return _join(self.block(node.body, then), self.block(node.orelse, other))
            case ast.While():
                return self._loop(node, state)
            case ast.For() | ast.AsyncFor():
                self._expression(node.iter, state)
                return self._loop(node, state)
            case ast.Try():
                return self._try(node, state)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    self._expression(item.context_expr, state)
                _called(state)
                after = self.block(node.body, state)
                if after is not None:
                    _called(after)
                return after
            case ast.Match():
                self._expression(node.subject, state)
                return _join(state, *(self.block(case.body, state) for case in node.cases))
            case ast.Return() | ast.Raise():
                self._parts(node, state)
                return None
            case ast.Continue():
                self._loops[-1][0].append(state)
                return None
            case ast.Break():
                self._loops[-1][1].append(state)
                return None
            case ast.Assert():
                return self._test(node.test, state)[0]
            case ast.Assign():
                self._expression(node.value, state)
                for target in node.targets:
                    self._assign(target, node.value, state)
            case ast.AnnAssign() if node.value is not None:
                self._expression(node.value, state)
                self._assign(node.target, node.value, state)
            case ast.AugAssign():
                self._read(node.target, state)
                self._expression(node.value, state)
                self._assign(node.target, None, state)
            case ast.Delete():
                for target in node.targets:
                    self._assign(target, None, state)
            case _:
                self._parts(node, state)
        return state

    def _loop(self, node: ast.While | ast.For | ast.AsyncFor, before: dict[str, Narrowed]) -> State:
        entry: State = before
        left: State = None
        for _ in range(2):
            if entry is None:
                return left
            self._loops.append(([], []))
            if isinstance(node, ast.While):
                then, other = self._test(node.test, dict(entry))
                if isinstance(node.test, ast.Constant) and node.test.value:
                    other = None
            else:
                then, other = dict(entry), dict(entry)
                self._assign(node.target, None, then)
                if isinstance(node, ast.AsyncFor):
                    _called(then)
            end = self.block(node.body, then)
            continued, broken = self._loops.pop()
            left = _join(self.block(node.orelse, other), *broken)
            entry = _join(before, end, *continued)
        return left

    def _try(self, node: ast.Try, before: dict[str, Narrowed]) -> State:
        states: list[State] = [before]
        state: State = before
        for statement in node.body:
            if state is None:
                break
            state = self._statement(statement, dict(state))
            states.append(state)
        raised = _join(*states)
        if raised is not None:
            _called(raised)
        handled = [self.block(handler.body, raised) for handler in node.handlers]
        after = _join(self.block(node.orelse, state), *handled)
        if not node.finalbody:
            return after
        ended = self.block(node.finalbody, _join(raised, after, *handled))
        return None if after is None else ended

    # --- tests

    def _test(self, node: ast.expr, state: dict[str, Narrowed]) -> tuple[State, State]:
        """Returns the states where the test is true and where it is false."""
        match node:
            case ast.UnaryOp(op=ast.Not()):
                then, other = self._test(node.operand, state)
                return other, then
            case ast.BoolOp():
                is_and = isinstance(node.op, ast.And)
                left: list[State] = []
                going: State = state
                for value in node.values:
                    if going is None:
                        break
                    then, other = self._test(value, going)
                    going, out = (then, other) if is_and else (other, then)
                    left.append(out)
                return (going, _join(*left)) if is_and else (_join(*left), going)
            case ast.Compare(ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
                name = self._tested(node.left, state)
                then, other = dict(state), dict(state)
                if name:
                    is_none = isinstance(node.ops[0], ast.Is)
                    then[name], other[name] = Narrowed(is_none), Narrowed(not is_none)
                return then, other
            case ast.Attribute():
                name = self._tested(node, state)
                then = dict(state)
                if name:
                    then[name] = Narrowed(False)  # false is more than None
                return then, dict(state)
        self._expression(node, state)
        return dict(state), dict(state)

    def _tested(self, node: ast.expr, state: dict[str, Narrowed]) -> str:
        name = _name(node)
        if not name:
            self._expression(node, state)
        elif (known := state.get(name)) is not None and known.called:
            self.found.add((node.lineno, name))
        return name

    # --- expressions

    def _parts(self, node: ast.AST, state: dict[str, Narrowed]) -> None:
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                self._expression(part, state)
            elif not isinstance(part, _SCOPES):
                self._parts(part, state)

    def _expression(self, node: ast.expr, state: dict[str, Narrowed]) -> None:
        match node:
            case ast.Lambda():
                return
            case ast.BoolOp():
                self._test(node, dict(state))
            case ast.IfExp():
                then, other = self._test(node.test, dict(state))
                for part, narrowed in ((node.body, then), (node.orelse, other)):
                    if narrowed is not None:
                        self._expression(part, narrowed)
            case ast.Attribute():
                self._read(node, state)
            case _:
                self._parts(node, state)
        if any(isinstance(part, _CALLS) for part in ast.walk(node)):
            _called(state)

    def _read(self, node: ast.expr, state: dict[str, Narrowed]) -> None:
        name = _name(node)
        known = state.get(name)
        if known is not None and known.is_none and known.called:
            self.found.add((node.lineno, name))
        self._parts(node, state)

    def _assign(self, target: ast.expr, value: ast.expr | None, state: dict[str, Narrowed]) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
            if len(values) != len(target.elts):
                values = [None] * len(target.elts)  # type: ignore[list-item]
            for part, its in zip(target.elts, values, strict=True):
                self._assign(part, its, state)
            return
        if isinstance(target, ast.Starred):
            self._assign(target.value, None, state)
            return
        name = target.id if isinstance(target, ast.Name) else _name(target)
        for known in list(state):
            if known == name or known.startswith(f"{name}."):
                del state[known]
        if isinstance(target, ast.Attribute) and name:
            if isinstance(value, ast.Constant) and value.value is None:
                state[name] = Narrowed(True)
        elif not name:
            self._parts(target, state)


def _name(node: ast.expr) -> str:
    """Returns an attribute of a variable, or of its attribute, as it is written; "" for anything else."""
    at: ast.expr = node
    while isinstance(at, ast.Attribute):
        at = at.value
    return ast.unparse(node) if isinstance(at, ast.Name) and isinstance(node, ast.Attribute) else ""


def _called(state: dict[str, Narrowed]) -> None:
    for name, known in state.items():
        state[name] = known._replace(called=True)


def narrowed_reads(source: str) -> list[tuple[int, str]]:
    """Returns line and attribute of each such read in a module."""
    found: set[tuple[int, str]] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = _Function()
            function.block(node.body, {})
            found |= function.found
    return sorted(found)


if __name__ == "__main__":
    reads = [
        f"{path}:{line}: {name}"
        for path in sys.argv[1:]
        for line, name in narrowed_reads(Path(path).read_text())
    ]
    print("\n".join(reads))
    sys.exit(bool(reads))
