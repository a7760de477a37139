"""What a notification can be about, found in the API's views of services and of the controller's health. Pure.

The first three agree with the alerts in `packaging/prometheus/alerts.yml`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from policies.budget import is_refusal
from policies.crashes import DOUBTFUL
from policies.model import EndReason
from policies.service_state import ServiceState
from skyserve_cli.output import span
from skyserve_cli.state.outbox import Key

View = Mapping[str, Any]

SHORT, GIVEN_UP, CRASHES, BUDGET, PREEMPTIONS, CUT_OFF, STORE, BACKUP = KINDS = (
    "short",
    "version_given_up",
    "crashes",
    "budget",
    "preemptions",
    "cut_off",
    "store",
    "backup",
)

SHORT_AFTER_S = 600.0
BUDGET_AFTER_S = 120.0  # a replica that ends soon may make room
CUT_OFF_AFTER_S = 60.0
#: Soon: a controller whose lease runs out meanwhile starts again, and knows nothing of it.
STORE_AFTER_S = 2.0
STORM_WINDOW_S = 600.0
STORM_LEAST = 3
STORM_SHARE = 0.5  # of the target


_GOING = frozenset(
    {ServiceState.SHUTTING_DOWN.value, ServiceState.FAILED_CLEANUP.value, ServiceState.DOWN.value}
)


class Condition(NamedTuple):
    """Something that is the case. It is notified of once it has been for `after_s`."""

    text: str
    after_s: float = 0.0


def of_services(
    views: Iterable[View], now: float, last_lines: Callable[[str], str] = lambda path: ""
) -> dict[Key, Condition]:
    """Return the conditions of services that are up, by (service, kind). `last_lines` are those of a file with a replica's log."""
    return {
        (str(view["name"]), kind): condition
        for view in views
        if view["status"] not in _GOING
        for kind, condition in (*_of_service(view, now), *_crashes(view, last_lines))
    }


def of_store(health: View, now: float) -> dict[Key, Condition]:
    """Return whether the state of the controller cannot be read or written."""
    store = health["store"]
    if store["ok"]:
        return {}
    away_s = span(max(0.0, now - store["since"]))
    text = f"the controller has not been able to read or write its state for {away_s}: {store['why']}"
    return {("", STORE): Condition(f"{text}. Replicas serve on, but none is replaced", STORE_AFTER_S)}


def of_backup(health: View, now: float) -> dict[Key, Condition]:
    """Return whether the newest backup in the bucket is older than two intervals, which are two days by default."""
    backup = health.get("backup")
    if backup is None or not backup["overdue"]:
        return {}
    newest = backup["newest_at"]
    age = f"the newest backup is {span(now - newest)} old" if newest else "there is no backup"
    why = f"; the last attempt failed: {backup['why']}" if backup["why"] else ""
    return {("", BACKUP): Condition(f"{age} in {backup['to']}{why}")}


def _of_service(view: View, now: float) -> Iterator[tuple[str, Condition]]:
    name, ready, wanted = view["name"], view["ready"], view["wanted"]
    if ready < wanted:
        failure = view["last_failure"]
        why = f"; the last failure: {failure['message'] or failure['reason']}" if failure else ""
        text = f"{name} has {ready} of {wanted} wanted replicas ready{why}"
        yield SHORT, Condition(text, SHORT_AFTER_S)
    if view["version"] in view["failed_versions"]:
        serving = view["serving_version"]
        then = "nothing is serving" if serving is None else f"version {serving} serves"
        yield GIVEN_UP, Condition(f"version {view['version']} of {name} was given up; {then}")
    if is_refusal(view["notes"]):
        yield BUDGET, Condition(f"{name}: {view['notes']}", BUDGET_AFTER_S)
    lost = _preempted(view["replicas"], now)
    if lost >= max(STORM_LEAST, STORM_SHARE * view["target"]):
        text = f"{name} has lost {lost} replicas to preemptions within {span(STORM_WINDOW_S)}"
        yield PREEMPTIONS, Condition(f"{text}; {ready} of {wanted} wanted ones are ready")
    unvisited = [r for r in (*view["replicas"], *view["load_balancers"]) if _is_cut_off(r, now)]
    if unvisited:
        ids = ", ".join(str(r["id"]) for r in unvisited[:10])
        text = f"the controller cannot reach {len(unvisited)} machines of {name} (replicas {ids})"
        yield (
            CUT_OFF,
            Condition(f"{text}; machines that it does not visit terminate themselves", CUT_OFF_AFTER_S),
        )


def _crashes(view: View, last_lines: Callable[[str], str]) -> Iterator[tuple[str, Condition]]:
    trial = view.get("trial")
    if trial is None or trial["short_lives"] < DOUBTFUL:
        return
    kept = [r for r in view["replicas"] if r["kept_log"] and r["version"] == trial["version"]]
    log = last_lines(max(kept, key=lambda replica: replica["id"])["kept_log"]) if kept else ""
    yield CRASHES, Condition("\n".join(filter(None, (f"{view['name']}: {trial['message']}", log))))


def _preempted(replicas: Sequence[View], now: float) -> int:
    return sum(
        r["end_reason"] == EndReason.PREEMPTED.value and (r["ended_at"] or now) > now - STORM_WINDOW_S
        for r in replicas
    )


def _is_cut_off(replica: View, now: float) -> bool:
    """Return whether half of the machine's lease is over without a visit (`provisioners.port.lease`)."""
    lease = replica["lease"]
    if lease is None or lease["visited_at"] is None:
        return False
    return bool(now - lease["visited_at"] > lease["lease_s"] / 2)
