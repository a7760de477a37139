"""A cache of what was last read of the services, kept up to date with this process's own writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from policies.model import ReplicaState, Role
from skyserve_cli.state.values import Commit, ServiceRow


@dataclass(slots=True)
class ReadCache:
    """The rows as of `count` changes. It is up to date as long as the database counts the same.

    `has_old_goals`: some of the last changes were to goals, and only the replicas are up to date. `_later` has commits by their
    numbers, until those before them are known.
    """

    count: int
    rows: dict[str, ServiceRow]
    has_old_goals: bool = False
    _later: dict[int, Sequence[Commit]] = field(default_factory=dict)

    def take_goals(self, rows: Sequence[ServiceRow]) -> None:
        """Take in what was read with the replicas of these rows. Rows that are as before stay the same objects."""
        before = self.rows
        self.rows = {row.name: was if (was := before.get(row.name)) == row and was else row for row in rows}
        self.has_old_goals = False

    def follow(self, count: int, commits: Sequence[Commit]) -> None:
        """Take in what was committed as the change number `count`; without commits it was a goal. The order of calls does not matter.

        If another process wrote in between, the cache stays as it is, and its count shows that it is out of date.
        """
        self._later[count] = commits
        while self.count + 1 in self._later:
            commits = self._later.pop(self.count + 1)
            if any(commit.name not in self.rows for commit in commits):
                return
            self.count += 1
            self.has_old_goals = self.has_old_goals or not commits
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
