"""What services have cost: of the replicas in the table, and the sums of those that were archived."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from skyserve_cli.state import tables as t
from skyserve_cli.state.values import Spent


def read_spent(c: Connection, now: float, name: str) -> dict[str, Spent]:
    """Return what each service has cost until `now`, or (`name` not empty) only that one."""
    r = t.replicas.c
    query = sa.select(r.service, *spent_columns(now)).group_by(r.service)
    query = query.where(r.service == name) if name else query
    sums = {row[0]: (row[1] or 0.0, row[2] or 0.0) for row in c.execute(query)}
    s = t.services.c
    nothing = (0.0, 0.0)
    folded = sa.select(s.name, s.folded_usd, s.folded_on_demand_usd)
    folded = folded.where(s.name == name) if name else folded
    return {
        name: Spent(usd + sums.get(name, nothing)[0], on_demand + sums.get(name, nothing)[1])
        for name, usd, on_demand in c.execute(folded)
    }


def spent_columns(now: float) -> tuple[sa.ColumnElement[float], sa.ColumnElement[float]]:
    """Return the columns that sum the cost of replicas until `now`, and the cost of on-demand ones in their place, in USD."""
    r = t.replicas.c
    seconds = sa.func.coalesce(r.ended_at, now) - r.launched_at
    hours = (
        sa.case((seconds < 0.0, 0.0), else_=seconds) / 3600.0
    )  # no cost is negative, also if the clock was set back
    on_demand = sa.func.coalesce(r.on_demand_usd_hour, r.price_usd_hour)
    return sa.func.sum(r.price_usd_hour * hours), sa.func.sum(on_demand * hours)


def read_spent_by_team(c: Connection, since: float, now: float) -> dict[str, float]:
    """Return what the services of each team have cost from `since` to `now`; of replicas in the table."""
    r, s = t.replicas.c, t.services.c
    ended = sa.func.coalesce(r.ended_at, now)
    begin = sa.case((r.launched_at > since, r.launched_at), else_=since)
    usd = sa.func.sum(r.price_usd_hour * (ended - begin) / 3600.0)
    query = (
        sa.select(s.team, usd)
        .join(t.replicas, r.service == s.name)
        .where(s.team != "", r.launched_at.is_not(None), ended > begin)
        .group_by(s.team)
    )
    return {team: float(spent) for team, spent in c.execute(query)}
