"""What was last read of the services, kept up with one's own writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from policies.model import ReplicaState, Role
from skyserve_cli.state.values import Commit, ServiceRow


@dataclass(slots=True)
class ReadCache:
    """The rows as of `count` changes. It is true as long as the database counts the same."""

    count: int
    rows: dict[str, ServiceRow]

    def follow(self, count: int, commits: Sequence[Commit]) -> None:
        """Take in what was committed as the change number `count`.

        If another process wrote in between, the cache stays as it is, and is found out of date.
        """
        if count != self.count + 1 or any(commit.name not in self.rows for commit in commits):
            return
        self.count = count
        for commit in commits:
            self._take(commit)

    def _take(self, commit: Commit) -> None:
        row = self.rows[commit.name]
        live = {one.id: one for one in row.attempts}
        live |= {replica.id: replica for replica in commit.changed}
        gone = {replica.id for replica in commit.changed if replica.state is ReplicaState.GONE}
        attempts = [live[number] for number in sorted(live) if number not in gone]
        if row.down and not attempts:
            del self.rows[commit.name]
            return
        self.rows[commit.name] = replace(
            row,
            replicas=tuple(one for one in attempts if one.role is Role.REPLICA),
            balancers=tuple(one for one in attempts if one.role is Role.LOAD_BALANCER),
            memory=row.memory if commit.memory is None else commit.memory,
            wanted=row.wanted if commit.wanted is None else commit.wanted,
            target=commit.target,
            notes=commit.notes,
            killed=row.killed - gone,
        )
