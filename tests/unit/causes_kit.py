"""Services with a fault, as the controller's API shows them: rows through the real views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from policies.deadlines import due
from policies.health import FailedProbe
from policies.history import Load
from policies.lifecycle import apply
from policies.model import (
    BootstrapFailed,
    Bootstrapped,
    CapacityType,
    EndReason,
    Event,
    FailureKind,
    GaveUp,
    Launched,
    LaunchFailed,
    Offer,
    ProbeFailed,
    ProbePassed,
    Replica,
    ReplicaState,
    RunExited,
    Zone,
)
from provisioners.remote.host_agent.exits import exit_sentence
from provisioners.remote.host_agent.lines import last_text_line
from skyserve_cli.causes.explain import Explanation, explain
from skyserve_cli.causes.facts import Address, Facts, subject
from skyserve_cli.causes.log_text import cleaned
from skyserve_cli.commands.sentences import words
from skyserve_cli.controller.api.views import last_failure, service_view
from skyserve_cli.controller.balancers.local_fleet import AgentView
from skyserve_cli.controller.balancers.regional_view import RegionalView
from skyserve_cli.controller.readiness import described
from skyserve_cli.controller.reconcile.mappers import goal_of
from skyserve_cli.controller.reconcile.troubles import BROKEN, broken
from skyserve_cli.controller.reconcile.turn import _with_causes
from skyserve_cli.spec.load import load_text
from skyserve_cli.state.values import ServiceRow, Spent
from tests.kit.rows import a_row

NOW = 1000.0
S = ReplicaState
SPEC = load_text(
    "name: chat\nservice: {readiness_probe: {path: /health, initial_delay_seconds: 300}, replicas: 1}\n"
    "resources: {use_spot: true}\nrun: x\n"
).spec
OFFER = Offer(Zone("aws", "us-east-1", "us-east-1a"), "g6.xlarge", "L4", 1.0, CapacityType.SPOT, 0.3, 1.0)
HERE = "http://203.0.113.7:8080"


def requested(replica_id: int = 1, *, version: int = 1, at: float = 0.0) -> Replica:
    return Replica(replica_id, version, OFFER, S.REQUESTED, at, at)


def lived(replica: Replica, *events: Event, at: float = 100.0) -> Replica:
    """The replica after events, ten seconds from one to the next, the first at `at`."""
    for step, event in enumerate(events):
        replica = apply(replica, event, at + 10.0 * step, 30.0)
    return replica


def starting(replica_id: int = 1, *, at: float = 100.0, version: int = 1, endpoint: str = HERE) -> Replica:
    return lived(
        requested(replica_id, version=version),
        Launched(replica_id, f"i-{replica_id}"),
        Bootstrapped(replica_id, endpoint),
        at=at,
    )


def ready(replica_id: int = 1, *, version: int = 1) -> Replica:
    return lived(starting(replica_id, version=version), ProbePassed(replica_id), at=200.0)


def exited(
    code: int,
    log: str = "",
    replica_id: int = 1,
    *,
    version: int = 1,
    left: Sequence[str] = (),
    oom: bool = False,
) -> Replica:
    """Its `run` has ended; the message is made as host agents make it."""
    message = exit_sentence("`run` ended", code, last_text_line(log.encode()), left, oom=oom)
    return lived(starting(replica_id, version=version), RunExited(replica_id, message), at=300.0)


def set_up(message: str) -> Replica:
    """Its `setup` has failed."""
    return lived(requested(), Launched(1, "i-1"), BootstrapFailed(1, message))


def refused(kind: FailureKind, message: str) -> Replica:
    return lived(requested(), LaunchFailed(1, kind, message))


def too_slow(trouble: str) -> Replica:
    """Time was up for a readiness probe to pass; the last one met `trouble`."""
    replica = starting()
    (event,) = due([replica], goal_of(row(replica), SPEC), Load(), NOW)
    (event,) = _with_causes([event], {1: failed(trouble)})
    return lived(replica, event, at=NOW - 10.0)


def silent(trouble: str) -> Replica:
    """It was ready, and its probe fails."""
    return lived(ready(), ProbeFailed(1, trouble), at=400.0)


def only_errors() -> Replica:
    why = "clients got 12 errors (5xx) in 95 s and nothing else"
    return lived(ready(), GaveUp(1, EndReason.ONLY_ERRORS, why), at=400.0)


def failed(trouble: str, *, timed_out: bool = False) -> FailedProbe:
    return FailedProbe(NOW - 1.0, reached=True, timed_out=timed_out, first_at=NOW - 30.0, why=trouble)


def status(code: int, location: str = "") -> str:
    return described(code, location)


def row(*replicas: Replica, **more: Any) -> ServiceRow:
    live = (replica for replica in replicas if replica.state is not S.GONE)
    base = a_row(*live, wanted=1, target=1)
    rollout = {"rollout": more.pop("rollout")} if "rollout" in more else {}
    return replace(base, memory=replace(base.memory, **rollout), **more)


@dataclass(frozen=True)
class Fault:
    """A service with a fault, and what was printed."""

    replicas: Sequence[Replica] = ()
    log: str = ""
    probes: Mapping[int, FailedProbe] = field(default_factory=dict)
    stored: Mapping[str, Any] = field(default_factory=dict)
    load: Load = field(default_factory=Load)
    agent: AgentView = field(default_factory=lambda: AgentView(True, True, 1, 0))
    regional: RegionalView | None = None
    listening: Sequence[Address] = ()
    unreadable: str = ""
    endpoint_trouble: str = ""
    requests: tuple[int, int] = (0, 0)
    events: Sequence[tuple[str, str, str]] = ()
    asked: int | None = None

    def view(self) -> dict[str, Any]:
        service = row(*self.replicas, **self.stored)
        balancers = (replace(ready(9), state=S.READY),) if self.regional is not None else ()
        service = replace(service, balancers=balancers)
        ended = [replica for replica in self.replicas if replica.state is S.GONE]
        found = service_view(
            service, SPEC, goal_of(service, SPEC), local_agent=None if self.regional else self.agent,
            agents={9: self.regional} if self.regional is not None else {}, load=self.load, spent=Spent(0.0, 0.0),
            host="127.0.0.1", ended=ended, num_nodes=dict.fromkeys(range(1, 9), 1), now=NOW,
            failure=last_failure(service, ended), failed_probes=self.probes,
        )  # fmt: skip
        if self.unreadable:
            found |= {"status": BROKEN, "notes": broken(service, self.unreadable)}
        return found

    def facts(self) -> Facts:
        view = self.view()
        events = [
            {"at": 900.0 + i, "replica_id": 1, "kind": kind, "state": state, "message": said, "words": words(kind)}
            for i, (kind, state, said) in enumerate(self.events)
        ]  # fmt: skip
        return Facts(
            view, NOW, subject(view, self.asked), self.asked is not None, events, cleaned(self.log.encode()),
            self.listening, self.endpoint_trouble, *self.requests,
        )  # fmt: skip

    def explained(self) -> Explanation:
        return explain(self.facts())
