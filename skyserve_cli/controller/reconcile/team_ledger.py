"""What the services of each team use in a tick, and what each of them may launch (`policies.quotas`).

Everything follows from rows of the database, so another controller that takes over goes on with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from policies.goals import Amounts, Quota, TeamRoom
from policies.model import Launch, Offer, Replica, Role
from policies.quotas import NOTHING, Claim, due, plus, room
from policies.rollout import COUNTED
from skyserve_cli.controller.reconcile.ports import Specs
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import ServiceRow

MONTH_EVERY_S = 60.0  # between two readings of what the month has cost


@dataclass(slots=True)
class _Team:
    """One team in this tick."""

    claims: dict[str, Claim]
    granted: dict[str, int]


class TeamLedger:
    """One per reconciler. `cheapest` returns the cheapest known offer for a replica of a service."""

    def __init__(
        self,
        store: Store,
        specs: Specs,
        quotas: Mapping[str, Quota],
        cheapest: Callable[[str], Offer | None],
    ) -> None:
        self._store = store
        self._specs = specs
        self._quotas = quotas
        self._cheapest = cheapest
        self._rows: Sequence[ServiceRow] = ()
        self._now = 0.0
        self._teams: dict[str, _Team] = {}
        self._month_usd: dict[str, float] = {}
        self._month_at: float | None = None

    def begin(self, rows: Iterable[ServiceRow], now: float) -> None:
        """Begin a tick."""
        self._rows, self._now, self._teams = tuple(rows), now, {}

    def room(self, row: ServiceRow) -> TeamRoom | None:
        """Return what the service may launch; None without a team that has limits."""
        quota = self._quotas.get(row.team)
        if quota is None:
            return None
        team = self._team(row.team, quota)
        month_usd = 0.0 if quota.max_usd_month is None else self._month(row.team)
        return room(row.team, row.name, quota, team.claims, team.granted, month_usd)

    def launched(self, row: ServiceRow, launches: Sequence[Launch]) -> None:
        """Count what was decided for the service in this tick."""
        team = self._teams.get(row.team)
        if team is None or not launches:
            return
        claim, used = team.claims[row.name], team.claims[row.name].used
        for launch in launches:
            used = plus(used, _use(launch.offer, launch.role, self._nodes(row.name, launch.version)))
        team.claims[row.name] = claim._replace(used=used)
        ours = sum(launch.role is Role.REPLICA for launch in launches)
        team.granted[row.name] = max(0, team.granted[row.name] - ours)

    def _team(self, name: str, quota: Quota) -> _Team:
        found = self._teams.get(name)
        if found is None:
            claims = {row.name: self._claim(row) for row in self._rows if row.team == name}
            found = self._teams[name] = _Team(claims, due(quota, claims))
        return found

    def _claim(self, row: ServiceRow) -> Claim:
        used = use_of(row, partial(self._nodes, row.name))
        counted = [replica for replica in row.replicas if replica.state in COUNTED]
        short = 0 if row.down else max(0, row.target - len(counted))
        return Claim(used, short, self._unit(row, counted) if short else NOTHING)

    def _unit(self, row: ServiceRow, counted: Sequence[Replica]) -> Amounts:
        """Return what one more replica would use: as much as the newest, or as the cheapest offer."""
        if counted:
            newest = max(counted, key=lambda replica: replica.id)
            return _use(newest.offer, newest.role, self._nodes(row.name, newest.version))
        offer = self._cheapest(row.name)
        if offer is None:
            return Amounts(replicas=1.0)
        return _use(offer, Role.REPLICA, self._nodes(row.name, row.version))

    def _nodes(self, service: str, version: int) -> int:
        return self._specs.get(service, version).num_nodes

    def _month(self, team: str) -> float:
        at, since = self._month_at, month_start(self._now)
        if at is None or not since <= at <= self._now < at + MONTH_EVERY_S:
            self._month_usd = self._store.spent_by_team(since, self._now)
            self._month_at = self._now
        return self._month_usd.get(team, 0.0)


def use_of(row: ServiceRow, num_nodes: Callable[[int], int]) -> Amounts:
    """Return what a service uses, with all that has, or may have, an instance; `num_nodes` is by version."""
    used = NOTHING
    for one in row.attempts:
        nodes = num_nodes(one.version) if one.role is Role.REPLICA else 1
        used = plus(used, _use(one.offer, one.role, nodes))
    return used


def month_start(now: float) -> float:
    """Return when the calendar month (UTC) of this instant began; both UNIX seconds."""
    return (
        datetime.fromtimestamp(now, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
    )


def _use(offer: Offer, role: Role, num_nodes: int) -> Amounts:
    """A load balancer costs, and is no replica."""
    if role is Role.LOAD_BALANCER:
        return Amounts(usd_hour=offer.price_usd_hour)
    return Amounts(offer.accelerator_count * num_nodes, 1.0, offer.price_usd_hour)
