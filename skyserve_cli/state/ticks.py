"""What a commit of the reconciler writes, prepared before its transaction begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from sqlalchemy.engine import Connection

from policies.model import ReplicaState
from skyserve_cli.state import statements as q
from skyserve_cli.state import tables as t
from skyserve_cli.state.codec import memory_from_json, memory_to_json, replica_to_row
from skyserve_cli.state.event_log import event_rows
from skyserve_cli.state.values import Commit


@dataclass(slots=True)
class PreparedCommits:
    """The rows of several commits. `read` has them as they would be read after they are written."""

    read: list[Commit] = field(default_factory=list)
    _statuses: dict[tuple[str, ...], list[dict[str, Any]]] = field(default_factory=dict)  # by the columns
    _replicas: list[dict[str, Any]] = field(default_factory=list)
    _events: list[dict[str, Any]] = field(default_factory=list)
    _gone: list[tuple[str, list[int], int | None]] = field(default_factory=list)

    @classmethod
    def of(cls, commits: Sequence[Commit], unasked: Callable[[str], int | None]) -> PreparedCommits:
        """`unasked` returns the revision at which it is known that no replica of a service is to be terminated by id."""
        self = cls()
        for commit in commits:
            self._add(commit, unasked)
        return self

    def _add(self, commit: Commit, unasked: Callable[[str], int | None]) -> None:
        status: dict[str, Any] = {"service": commit.name, "target": commit.target, "notes": commit.notes}
        if commit.wanted is not None:
            status["wanted"] = commit.wanted
        if commit.memory is None:
            self.read.append(commit)
        else:
            number = commit.memory.next_replica_id
            written = memory_to_json(commit.memory)
            status |= {"memory": written, "next_replica_id": number}
            # JSON has no tuples, and only text for keys.
            memory = memory_from_json(orjson.loads(orjson.dumps(written)), number)
            self.read.append(replace(commit, memory=memory))
        self._statuses.setdefault(tuple(status), []).append(status)
        self._replicas += [replica_to_row(commit.name, replica) for replica in commit.changed]
        self._events += event_rows(commit.name, commit.now, commit.records)
        gone = [replica.id for replica in commit.changed if replica.state is ReplicaState.GONE]
        if gone:
            self._gone.append((commit.name, gone, unasked(commit.name)))

    def write(self, c: Connection, revision: int) -> None:
        """Write them in the transaction of their caller, as the change number `revision`."""
        for columns, group in self._statuses.items():
            c.execute(q.SET_STATUS[columns[1:]], group)
        if self._replicas:
            c.execute(q.UPSERT[t.replicas.name, c.dialect.name], self._replicas)
        for name, gone, unasked in self._gone:
            # As of this revision no user has requested the end of a replica by id, so there is no wish to strike out.
            if unasked is None or revision != unasked + 1:
                c.execute(q.END_KILLS, {"service_": name, "gone": gone})
        if self._events:
            c.execute(q.APPEND_EVENTS, self._events)
