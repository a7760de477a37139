"""The tables of `serve status`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.text import Text

from skyserve_cli.commands.options import View
from skyserve_cli.commands.sentences import (
    INTERPRETED,
    ONLY_HERE,
    STANDS_IN,
    end_of,
    exit_message,
    live_replicas,
    stand_ins,
    version_given_up,
    why_hint,
)
from skyserve_cli.output import accelerators, date_time, place, plural, printable, span, usd
from skyserve_cli.text_tables import FittedTable

#: The columns that a narrow terminal does not show, the first to go first. Ids, states and messages always stay.
_LESS_OF_SERVICES = ("SAVED", "UPTIME", "$/H", "REPLICAS", "VERSION")
_LESS_OF_REPLICAS = ("ACCELERATOR", "VERSION", "CAPACITY", "$/H", "AGE", "ZONE")
_LESS_OF_AGENTS = ("CODE", "$/H", "AGE", "ZONE")
_LESS_OF_PEERS = ("P90", "TTFT P50", "$ THERE")


def tables(services: Sequence[View], now: float, *, wide: bool) -> list[FittedTable | Text]:
    """Return the services, a line for each thing worth knowing about one, and the replicas."""
    replicas = [(view, replica) for view in services for replica in view["replicas"]]
    shown: list[FittedTable | Text] = [_service_table(services, now, wide=wide)]
    shown += [
        Text(printable(f"{view['name']}: {note}"))
        for view in services
        for note in (*_notes(view), *_availability_lines(view, now))
    ]
    shown += [Text(printable(line)) for line in (*_reach(services), *_not_compiled(services))]
    if replicas:
        shown += [Text(), _replica_table(replicas, now, wide=wide)]
    agents = [(view, agent) for view in services for agent in view["load_balancers"]]
    if agents:
        shown += [Text(), _agent_table(agents, now, wide=wide)]
    linked = [(view, agent) for view, agent in agents if agent.get("peers")]
    if linked:
        shown += [Text(), _peer_table(linked, wide=wide)]
    return shown


def ages(services: Sequence[View], now: float) -> tuple[str, ...]:
    """Return what the tables show that changes with time alone."""
    timed = [
        part
        for view in services
        for part in (view, *view["load_balancers"], *(r for r in view["replicas"] if not r["ended_at"]))
    ]
    return tuple(span(now - part["created_at"]) for part in timed)


def _service_table(services: Sequence[View], now: float, *, wide: bool) -> FittedTable:
    columns = ["SERVICE", "VERSION", "STATUS", "REPLICAS", "$/H", "SAVED", "UPTIME", "ENDPOINT"]
    if wide:
        columns += [
            "SPOT",
            "ON DEMAND",
            "$ TOTAL",
            "$ ON DEMAND",
            "#REQ/S",
            "#IN FLIGHT",
            "#QUEUED",
            "POLICY",
            "LB BUILD",
        ]
    has_teams = wide and any(view.get("team") for view in services)
    columns += ["TEAM"] if has_teams else []
    rows = []
    for view in services:
        cost, load, rate = view["cost"], view["load"], view["load"]["requests_per_s"]
        row = [
            view["name"],
            _version(view),
            view["status"],
            _size(view),
            usd(cost["usd_per_hour"]),
            _saved(cost["usd_per_hour"], cost["usd_per_hour_wanted_on_demand"]),
            span(now - view["created_at"]),
            view["endpoint"],
        ]
        if wide:
            row += [
                _ready(view, "spot"),
                _ready(view, "on_demand"),
                usd(cost["usd_total"]),
                usd(cost["usd_on_demand_equivalent"]),
                "-" if rate is None else f"{rate:.1f}",
                str(load["in_flight"]),
                str(load["queued"]),
                view["load_balancing_policy"],
                _build(view.get("load_balancer")),
            ]
        row += [view.get("team") or "-"] if has_teams else []
        rows.append(row)
    return FittedTable(columns, rows, drop=() if wide else _LESS_OF_SERVICES, folds=False)


def _version(view: View) -> str:
    """Return the version that serves, and the newest one if that is another: ``5 (6 failed)``, ``5 (6 coming)``."""
    newest, serving = view["version"], view["serving_version"]
    if serving in (None, newest):
        return str(newest)
    return f"{serving} ({newest} {'failed' if newest in view['failed_versions'] else 'coming'})"


def _size(view: View) -> str:
    """Ready of wanted, and how many there are to be beyond that: ``2/2+1``."""
    extra = view["target"] - view["wanted"]
    return f"{view['ready']}/{view['wanted']}" + (f"+{extra}" if extra > 0 else "")


def _ready(view: View, capacity_type: str) -> str:
    """Return how many of that capacity type are ready, and how many are on their way: ``1 (2 coming)``."""
    states = [r["state"] for r in view["replicas"] if r["capacity_type"] == capacity_type]
    ready, coming = states.count("READY"), sum(state in _COMING for state in states)
    return f"{ready}" + (f" ({coming} coming)" if coming else "")


_COMING = frozenset({"REQUESTED", "PROVISIONING", "STARTING"})


def _saved(paid: float, on_demand: float) -> str:
    """Against as many replicas as are wanted, on demand; below zero where they would be cheaper."""
    return f"{1 - paid / on_demand:.0%}" if paid and on_demand else "-"


def _notes(view: View) -> Iterator[str]:
    """Yield what the controller has to say, and what stands in for spot."""
    version = view["version"]
    if view.get("slo"):  # a controller of an earlier release sends none
        yield slo_line(view["slo"])
    if view["notes"]:
        yield view["notes"]
    elif view["ready"] and version in view["failed_versions"]:
        yield version_given_up(version, serves=True)
    failure = view["last_failure"]
    if failure is not None:
        yield exit_message(failure["replica_id"], failure, failure["reason"])
    if _needs_why(view):
        yield why_hint(view["name"])
    standing_in = sum(replica["stands_in"] and replica["state"] != "GONE" for replica in view["replicas"])
    if standing_in:
        yield f"{stand_ins(standing_in)}; spot ready: {_ready(view, 'spot')}"
    warming = view.get("warming")  # a controller of an earlier release sends none
    if warming:
        names = ", ".join(map(str, warming))
        yield f"new replicas compute frequent prefixes before they get their share of the requests: {names}"


def _needs_why(view: View) -> bool:
    """Return whether no replica is ready although some are wanted, and something is known of why."""
    if view["ready"] or not view["wanted"] or view["status"] not in ("REPLICA_INIT", "FAILED"):
        return False
    return bool(view["notes"] or view["last_failure"] or any(one["message"] for one in live_replicas(view)))


def _availability_lines(view: View, now: float) -> Iterator[str]:
    """Yield what RiskHedge was asked for, and what came of it."""
    kept = view["availability"]
    if kept is None:
        return
    left = kept["outages_left"]
    month = f"{left:.1f} more outages allowed" if left >= 0 else f"{-left:.1f} outages more than allowed"
    yield (
        f"all replicas ready: target {round(100 * kept['target'], 3):g}%; {kept['realised']:.3%} in {span(now - kept['since'])} "
        f"({plural(kept['outages'], 'outage')}), {kept['realised_month']:.3%} in 30 days ({month}), "
        f"{kept['predicted']:.3%} predicted now"
    )


def _reach(services: Sequence[View]) -> Iterator[str]:
    """Yield which endpoints only this machine can reach, and what opens them."""
    names = [view["name"] for view in services if view["endpoint_reach"] == "this_machine"]
    if names:
        yield f"{', '.join(names)}: {ONLY_HERE}"


def _build(agent: View | None) -> str:
    """Return how a load balancer agent runs; there is none, or one of an earlier release: ``-``."""
    build = None if agent is None else agent.get("build")
    if not build:
        return "-"
    if not build["fast_path"]:
        return f"{build['kind']}, no C helper"
    workers = int(build.get("workers", 1))
    parts = [str(build["kind"]), f"{workers} workers" if workers > 1 else ""]
    parts.append("no C helper for TLS" if build.get("slow_tls") else "")
    return ", ".join(filter(None, parts))


def _not_compiled(services: Sequence[View]) -> Iterator[str]:
    """Yield why load balancers are interpreted that should not be, each reason once."""
    names: dict[str, dict[str, None]] = {}  # by reason, in order
    for view in services:
        for agent in (view.get("load_balancer"), *view["load_balancers"]):
            reason = ((agent or {}).get("build") or {}).get("not_compiled")
            if reason:
                names.setdefault(reason, {})[view["name"]] = None
    for reason, of in names.items():
        yield f"{', '.join(of)}: {INTERPRETED.format(reason=reason)}"


def _agent_table(agents: Sequence[tuple[View, View]], now: float, *, wide: bool) -> FittedTable:
    columns = ["LOAD BALANCER", "STATE", "ZONE", "ENDPOINT", "CODE", "$/H", "AGE", "MESSAGE"]
    columns[5:5] = ["BUILD"] if wide else []
    rows = [
        [
            f"{view['name']}/{agent['id']}",
            agent["state"],
            place(agent),
            agent["endpoint"] or "-",
            (agent["agent_version"] or "-")
            + ("" if agent["newest"] else " (old)" if agent["agent_version"] else ""),
            *([_build(agent)] if wide else []),
            usd(agent["price_usd_hour"]),
            span(now - agent["created_at"]),
            _with_lease(agent, now),
        ]
        for view, agent in agents
    ]
    return FittedTable(columns, rows, drop=() if wide else _LESS_OF_AGENTS, folds=not wide)


def _peer_table(agents: Sequence[tuple[View, View]], *, wide: bool) -> FittedTable:
    columns = [
        "LOAD BALANCER", "#TTFT P50", "#P90", "PEER", "#RTT MS", "#SENT THERE", "#CAME FROM THERE", "#$ THERE",
        "SERVES",
    ]  # fmt: skip
    rows = []
    for view, agent in agents:
        serves = ", ".join(
            [*(agent.get("owned") or ()), *(f"{one} (taken over)" for one in agent.get("taken_over") or ())]
        )
        own = [f"{view['name']}/{agent['id']}", *(_ms(agent.get(f"ttft_{one}_s")) for one in ("p50", "p90"))]
        for peer in agent["peers"]:
            rtt_ms = peer["rtt_ms"]
            rows.append(
                [
                    *own,
                    peer["region"] + _state_of_peer(peer),
                    "-" if rtt_ms is None else f"{rtt_ms:.0f}",
                    str(peer["forwarded_out"]),
                    str(peer["forwarded_in"]),
                    usd(peer.get("egress_usd") or 0.0),
                    serves,
                ]
            )
            own[1:], serves = ["", ""], ""  # once for each agent
    return FittedTable(columns, rows, drop=() if wide else _LESS_OF_PEERS, folds=not wide)


def _state_of_peer(peer: View) -> str:
    """Return why requests do not go there, if they do not; an agent of an earlier release reports no certificate."""
    if peer.get("dead"):
        return " (dead)"
    lapse = peer.get("certificate")
    return f" (certificate {lapse.replace('_', ' ')})" if lapse else ""


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"


def _with_lease(machine: View, now: float) -> str:
    """Return the message, and how long the machine goes on if the controller cannot visit it."""
    message = str(machine["message"])
    lease = machine.get("lease")  # a controller of an earlier release sends none
    if not lease or lease["ends_at"] is None or machine["ended_at"]:
        return message
    left, most = span(lease["ends_at"] - now), span(lease["ends_at_with_traffic"] - now)
    since = date_time(lease["visited_at"])
    text = f"lease: {left} left, {most} with traffic ({lease['why']}; last visit {since})"
    return f"{message}; {text}" if message else text


def _replica_table(replicas: Sequence[tuple[View, View]], now: float, *, wide: bool) -> FittedTable:
    columns = ["REPLICA", "VERSION", "STATE", "ZONE", "CAPACITY", "ACCELERATOR", "$/H", "AGE"]
    columns += ["ENDPOINT", "INSTANCE", "MESSAGE"] if wide else ["MESSAGE"]
    rows = []
    for view, replica in replicas:
        row = [
            f"{view['name']}/{replica['id']}",
            str(replica["version"]),
            replica["state"],
            place(replica),
            replica["capacity_type"],
            accelerators(replica),
            usd(replica["price_usd_hour"]),
            span((replica["ended_at"] or now) - replica["created_at"]),
        ]
        if wide:
            row += [replica["endpoint"] or "-", replica["instance_id"] or "-"]
        why = _with_lease(replica, now) or (STANDS_IN if replica["stands_in"] else "")
        rows.append([*row, end_of(replica["end_reason"], why) if replica["end_reason"] else why])
    return FittedTable(columns, rows, drop=() if wide else _LESS_OF_REPLICAS, folds=not wide)


def _replicas(slo: View, rate: str) -> int:
    """Return how many replicas a rate needs with the headroom, before the limits of the file."""
    carried = 60.0 * float(slo["capacity_qps"]) / float(slo["headroom"])
    return max(0, math.ceil(float(slo[rate]) / carried - 1e-9))


def slo_line(slo: View) -> str:
    """Return how the SLO is kept, the expectation, and what the size is computed from."""
    asked = f"{100 * slo['attainment_asked']:g} %"
    if slo["attainment"] is None:
        return f"SLO {asked}: no request has been counted yet"
    parts = [
        f"SLO {100 * slo['attainment']:.2f} % of {asked} in time (24 h), "
        + (f"budget {100 * slo['budget_left']:.0f} % left" if slo["budget_left"] >= 0 else "budget used up")
    ]
    if slo["requests_per_min"] is None:
        return parts[0]
    start = span(slo["cold_start_s"])
    needed, rate = (
        f"needs {_replicas(slo, 'work_per_min')}",
        f"{slo['requests_per_min']:.0f} requests/min",
    )
    size = slo["work_per_request"]
    rate += " (tokens not known)" if size is None else f" x {size:.2f} of the usual tokens"
    if slo["autoscaler"] != "reactive":
        needed += f" -> {_replicas(slo, 'forecast_per_min')}"
        rate += f" -> {slo['forecast_per_min']:.0f} in {start}"
    parts.append(f"{needed} replicas: {rate}")
    learned = " (learned)" if slo["capacity_learned"] else ""
    parts.append(
        f"headroom {slo['headroom']:.2f}, {slo['capacity_qps']:.3g} requests/s per replica{learned}, a start takes {start}"
    )
    if slo["would_want"] is not None:
        parts.append(f"the forecast would want {slo['would_want']:.0f} replicas")
    return "; ".join(parts)
