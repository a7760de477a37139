"""What a call of the controller waits for, and what to do next: pure functions of what the controller says of itself.

The controller responds to `GET /v1/activity` from memory (`activity`), also while its database does not respond. Where it does not
respond at all, its home shows whether it starts, stops, or has no process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from skyserve_cli.output import span

#: What takes less time than this keeps no call waiting.
LONG_S = 2.0
JUMP_SHOWN_S = 60.0
CHECK_NETWORK = "check the network to it"
LOG_HINT = "see `serve logs --controller`"
_GO_ON = "services keep serving meanwhile"
#: What calls wait for that need no database alone, by the beginning of their path.
_ELSEWHERE = {
    "/v1/tidy": "it looks in the clouds for what is left of the services",
    "/v1/leaks": "it looks in the clouds for what belongs to nothing",
    "/v1/logs/replica": "it reads the log on the replica's machine",
    "/v1/plan": "it looks for places and prices",
    "/v1/uploads": "it stores the files",
}


class Reason(NamedTuple):
    """`kind` is the same as long as the reason is, `sentence` says what the controller waits for, `next_step` what to do."""

    kind: str
    sentence: str
    next_step: str


def of_activity(found: Mapping[str, Any], path: str = "") -> Reason:
    """Return what keeps a call of that path waiting, of a controller that has responded to `GET /v1/activity`."""
    database, lease, tick, jump = (found[key] for key in ("database", "lease", "tick", "clock_jump"))
    check_database = f"check the database server and the network to it; {_GO_ON}"
    if found["stopping"]:
        return Reason("stopping", "it is stopping", "start it again with `serve controller start`")
    if database["slow_s"] >= LONG_S:
        sentence = (
            f"its database {database['url']} responds slowly or not at all, for {span(database['slow_s'])}"
        )
        return Reason("slow database", sentence, check_database)
    if database["why"]:
        sentence = f"it cannot read or write its state, for {span(database['bad_s'])} ({database['why']})"
        return Reason("database", sentence, check_database)
    if tick is not None and tick["for_s"] >= LONG_S:
        busy = "its processor is busy: " if tick["service"] else ""
        return Reason(f"tick {tick['service']}", busy + of_tick(tick), _after_tick(tick))
    if jump is not None and jump["ago_s"] < JUMP_SHOWN_S:
        sentence = f"the clock of its host was set by {jump['by_s']:+.0f} s, {span(jump['ago_s'])} ago"
        return Reason("clock", sentence, f"check the host's clock; {_GO_ON}")
    for beginning, sentence in _ELSEWHERE.items():
        if path.startswith(beginning):
            return Reason(beginning, sentence + _call(found["cloud_calls"]), LOG_HINT)
    if lease["unfit"]:
        return Reason("unfit", f"it must not lead: {lease['unfit']}", LOG_HINT)
    if not lease["leads"]:
        who = lease["leader"] or "no controller"
        return Reason("stands by", f"it stands by; {who} leads", "run the command at the one that leads")
    return Reason(
        "busy", "it works on the request; its database responds, and no service stalls it", LOG_HINT
    )


def of_tick(tick: Mapping[str, Any]) -> str:
    """Return what a tick is doing, as a sentence without its end."""
    if tick["database_s"] >= LONG_S:
        of_whom = f" about service {tick['service']}" if tick["service"] else ""
        return f"the tick{of_whom} has waited for the database for {span(tick['database_s'])}"
    if tick["service"]:
        return f"the tick has decided about service {tick['service']} for {span(tick['turn_s'])}"
    return f"the tick has gone on for {span(tick['for_s'])}"


def of_stopping(found: Mapping[str, Any]) -> str:
    """Return what a controller that stops still waits for, as a sentence without its end."""
    database, tick = found["database"], found["tick"]
    if tick is not None and max(tick["for_s"], tick["database_s"]) >= LONG_S:
        return of_tick(tick)
    if database["longest_s"] >= LONG_S:
        return (
            f"a transaction of the database {database['url']} has gone on for {span(database['longest_s'])}"
        )
    return "its connections are being closed" + _call(found["cloud_calls"])


def of_home(
    phase: Mapping[str, Any] | None, now: float, pid: int | None, state: str, *, kept: bool
) -> Reason:
    """Return why the controller of a home does not respond.

    `pid` is its process, None if there is none; `state` the letter of /proc; `kept`: a supervisor starts it again.
    """
    if pid is None:
        sentence = "it has no process, and its supervisor starts one" if kept else "it is not running"
        return Reason("ended", sentence, "start it with `serve controller start`")
    if state in ("T", "t"):
        sentence = f"its process {pid} is stopped by a signal (state {state})"
        return Reason("frozen", sentence, f"let it go on with `kill -CONT {pid}`; {_GO_ON}")
    if phase is not None:
        sentence = f"its process {phase['pid']} has been {phase['doing']} for {span(now - phase['since'])}"
        sentence += f": {phase['detail']}" if phase["detail"] else ""
        kind = re.sub(r"\d", "", f"{phase['doing']}: {phase['detail']}")
        return Reason(kind, sentence, f"wait, or see the file logs/controller.log; {_GO_ON}")
    process = f"process {pid}" if pid else "process"
    sentence = f"its {process} does not respond: it gets no CPU, or waits for a disk (state {state or '?'})"
    return Reason("silent", sentence, f"see the file logs/controller.log; {_GO_ON}")


def _after_tick(tick: Mapping[str, Any]) -> str:
    name = tick["service"]
    return (
        f"take it down with `serve down {name}`, or update it; {_GO_ON}" if name else f"{LOG_HINT}; {_GO_ON}"
    )


def _call(calls: list[Mapping[str, Any]]) -> str:
    """Return the oldest call of a cloud, where there is one."""
    if not calls or calls[0]["for_s"] < LONG_S:
        return ""
    one = calls[0]
    return (
        f" (meanwhile the {one['kind']} of replica {one['replica_id']} of {one['service']} has waited for {one['cloud']} "
        f"for {span(one['for_s'])})"
    )
