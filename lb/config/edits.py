"""Changes to a table by hand: a worker more or less, a drain, other options. Pure: a table in, a table out.

An edited table gets a revision of its own, made from its content, so that a controller sees that this is not the
table it pushed, and pushes again: under a controller the controller has the last word, and edits are for agents
that run alone, or for the minutes of an emergency in which it is away.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lb.config.decode import WireError, kind_of
from lb.config.schema import Readiness, Table, Target

OPTIONS = (
    "policy",
    "limits",
    "retries",
    "breaker",
    "pushing",
    "continuation",
    "access",
    "cors",
    "trusted_proxies",
    "session",
    "listen",
    "metrics",
)
# What SGLang's gateway may also have: prefill and decode workers, which cannot serve a request alone, and gRPC.
_SERVED = (("worker_type", "regular"), ("connection_mode", "http"))


class UnknownWorkerError(LookupError):
    """The table has no target of this id or URL."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Worker {name} not found")


class KnownWorkerError(ValueError):
    """The table has such a target already."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Worker {name} already exists")


def aged(table: Table, seconds: float) -> Table:
    """Return the table as it is `seconds` after its push.

    The deadlines of drains count from a push, so an edit that pushed them again unchanged would put them off.
    """
    return replace(
        table,
        targets=tuple(
            replace(target, drain_deadline_s=max(0.0, target.drain_deadline_s - seconds))
            if target.drain_deadline_s is not None
            else target
            for target in table.targets
        ),
    )


def find(table: Table, target_id: str) -> Target:
    """Raise UnknownWorkerError."""
    for target in table.targets:
        if target.id == target_id:
            return target
    raise UnknownWorkerError(target_id)


def worker(value: object, target_id: str | None = None) -> Target:
    """Return a target from the body of a request, as `lb.config.schema.Target` has it, or as SGLang's gateway has a worker.

    With a `url` and perhaps a `worker_type`. Without an id it gets one made from its URL. Raises WireError.
    """
    given = {"health_path": "/health", **_object(value)}
    digest = hashlib.sha256(str(given.get("url")).encode(errors="replace"))  # the URL is not checked yet
    made = f"worker-{digest.hexdigest()[:12]}"
    given.setdefault("id", made if target_id is None else target_id)
    return _target(given, target_id)


def changed_worker(known: Target, change: object) -> Target:
    """Return the target with some fields changed. Raises WireError."""
    return _target({**known.to_json(), **_object(change)}, known.id)


def with_target(table: Table, target: Target) -> Table:
    """Raise KnownWorkerError if the id or the URL is taken, WireError if the table is full."""
    for known in table.targets:
        if known.id == target.id or known.url == target.url:
            raise KnownWorkerError(target.url)
    return _edited(table, targets=[*table.targets, target])


def without_target(table: Table, target_id: str) -> Table:
    """Raise UnknownWorkerError."""
    gone = find(table, target_id)
    return _edited(table, targets=[target for target in table.targets if target is not gone])


def with_changed(table: Table, target: Target) -> Table:
    """The target of this id is described again.

    Another URL would be another backend under a used id, and is refused with WireError. Raises UnknownWorkerError.
    """
    known = find(table, target.id)
    if target.url != known.url:
        raise WireError("url", "stays; remove the worker and add the other one")
    return _edited(table, targets=[target if one is known else one for one in table.targets])


def drained(table: Table, target_id: str, deadline_s: float | None) -> Table:
    """Return the target takes nothing new; what it has must be over, or elsewhere, in `deadline_s`.

    Raises UnknownWorkerError.
    """
    known = find(table, target_id)
    return with_changed(table, replace(known, state=Readiness.DRAINING, drain_deadline_s=deadline_s))


def undrained(table: Table, target_id: str) -> Table:
    """The target is ready again. Raises UnknownWorkerError."""
    known = find(table, target_id)
    return with_changed(table, replace(known, state=Readiness.READY, drain_deadline_s=None))


def options(table: Table) -> dict[str, Any]:
    """Return all that is not a target."""
    document = table.to_json()
    return {name: document[name] for name in OPTIONS}


def with_options(table: Table, change: object) -> Table:
    """Some options changed, the others kept. Raises WireError with the path of the problem."""
    before = options(table)
    after: dict[str, Any] = {}
    for name, value in _object(change).items():
        if name not in before:
            raise WireError(str(name)[:80], "is not known")
        merge = isinstance(value, dict) and isinstance(before[name], dict)
        after[name] = {**before[name], **value} if merge else value
    return _edited(table, **after)


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WireError("", f"expected an object, got {kind_of(value)}")
    return value


def _target(given: dict[str, Any], target_id: str | None) -> Target:
    for name, only in _SERVED:
        if given.pop(name, only) != only:
            raise WireError(name, f"expected {only}")
    target = Target.from_json(given)
    if target_id is not None and target.id != target_id:
        raise WireError("id", f"is {target_id!r} and stays so")
    return target


def _edited(table: Table, **changes: object) -> Table:
    """Read back as strictly as a push: an edit cannot make a table that a push could not."""
    document: Mapping[str, Any] = {**table.to_json(), **changes}
    if "targets" in changes:
        document = {**document, "targets": [target.to_json() for target in document["targets"]]}
    content = json.dumps({**document, "revision": ""}, sort_keys=True)
    return Table.from_json(
        {**document, "revision": f"edit-{hashlib.sha256(content.encode()).hexdigest()[:12]}"}
    )
