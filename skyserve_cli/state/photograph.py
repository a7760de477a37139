"""What was last read of the services, kept up with one's own writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from policies.model import Memory, Replica, ReplicaState, Role
from skyserve_cli.state.values import ServiceRow


@dataclass(slots=True)
class Photograph:
    """The rows as of `count` changes. It is true as long as the database counts the same."""

    count: int
    rows: dict[str, ServiceRow]

    def follow(
        self,
        count: int,
        name: str,
        changed: Sequence[Replica],
        memory: Memory | None,
        wanted: int | None,
        target: int,
        notes: str,
    ) -> None:
        """Take in one commit, the change number `count`. If somebody else wrote in between, the photograph stays
        as it is, and is found out of date."""
        row = self.rows.get(name)
        if count != self.count + 1 or row is None:
            return
        live = {one.id: one for one in row.attempts}
        live |= {replica.id: replica for replica in changed}
        gone = {replica.id for replica in changed if replica.state is ReplicaState.GONE}
        attempts = [live[number] for number in sorted(live) if number not in gone]
        self.count = count
        if row.down and not attempts:
            del self.rows[name]
            return
        self.rows[name] = replace(
            row,
            replicas=tuple(one for one in attempts if one.role is Role.REPLICA),
            balancers=tuple(one for one in attempts if one.role is Role.LOAD_BALANCER),
            memory=row.memory if memory is None else memory,
            wanted=row.wanted if wanted is None else wanted,
            target=target,
            notes=notes,
            killed=row.killed - gone,
        )
