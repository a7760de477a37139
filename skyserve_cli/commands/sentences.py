"""The sentences of conditions that several verbs print: one condition, one sentence.

Imports no Rich and no store, for verbs that only read.
"""

from __future__ import annotations

import re

from skyserve_cli.commands.options import View
from skyserve_cli.output import place, plural, span

ONLY_HERE = "only this machine can reach it; set service.load_balancer.host to 0.0.0.0 to open it"
INTERPRETED = "the load balancer is interpreted, which takes more CPU: {reason}"

NO_SERVICE = "no service is up"
CONTROLLER_DOWN = "the controller is not running"
STANDS_IN = "stands in for spot"
GIVEN_UP = "was given up"

#: The kinds of events, in at most 16 characters. The words for an end are those of its reason: SETUP_FAILED, RUN_EXITED.
EVENTS = {
    "Launch": "launch",
    "Launched": "launched",
    "LaunchFailed": "launch failed",
    "Progressed": "progressed",
    "Bootstrapped": "setup done",
    "BootstrapFailed": "setup failed",
    "RunExited": "run exited",
    "ProbePassed": "probe passed",
    "ProbeFailed": "probe failed",
    "GaveUp": "given up",
    "PreemptionNotice": "preempt notice",
    "RetireNotice": "retire notice",
    "Preempted": "preempted",
    "NodeLost": "node lost",
    "Drain": "drain",
    "Drained": "drained",
    "Terminate": "terminate",
    "Terminated": "terminated",
    "CallbackFailed": "callback failed",
    "NotRemoved": "not removed",
    "RegionClosed": "region closed",
    "Removed": "removed",
    "clock": "clock",
    "backup": "backup",
    "cache": "cache",
    "error": "error",
    "goal": "goal",
    "network": "network",
    "note": "note",
    "scale": "scale",
    "session": "session",
}


def words(kind: str) -> str:
    """``ProbePassed`` -> ``probe passed``; also of kinds that another release wrote."""
    return EVENTS.get(kind) or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind).lower()


def version_given_up(version: int, *, serves: bool) -> str:
    """Return a version that failed, and what serves instead."""
    return f"version {version} {GIVEN_UP}; {'an earlier one serves' if serves else 'nothing is serving'}"


def why_hint(name: str) -> str:
    """Return where the cause of a failure is."""
    return f"the cause, and what to do: serve why {name}"


def stand_ins(count: int) -> str:
    """Return how many replicas are on demand because spot ones are missing."""
    return f"{plural(count, 'on-demand replica')} {STANDS_IN if count == 1 else STANDS_IN.replace('stands', 'stand')}"


def timed_out(seconds: float) -> str:
    return f"timed out after {span(seconds)}; it goes on without this command"


def end_of(reason: str, message: str) -> str:
    """Return why a replica terminated: ``SETUP_FAILED, no weights in /models``."""
    return f"{reason}, {message}" if message else reason


def live_replicas(view: View) -> list[View]:
    return [replica for replica in view["replicas"] if replica["state"] != "GONE"]


def exit_message(replica_id: int, where: View, reason: str) -> str:
    """Return how a replica terminated, in one sentence. `where` has its place and its message."""
    return f"replica {replica_id} in {place(where)} ended: {end_of(reason, where['message'])}"
