"""One real machine of a cloud, through the whole path and to its end: `serve check --launch`.

    firewall -> launch -> boot, ssh, agent, `setup` -> `run` -> a response over the network -> termination -> nothing is left

The machine has an owner of its own, so that a controller of the same home neither serves nor removes it. In every case the
machine is terminated, Ctrl-C included; the caller writes the owner down before the launch, for the case that this process is killed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from policies.model import Offer
from provisioners.port.base import Gated, Instance, InstanceState, LaunchOrder
from provisioners.port.errors import CapacityError, ProvisionError, QuotaError, RefusedError, TransientError
from provisioners.vm_provisioner import CONSISTENT_AFTER_S, VmProvisioner
from skyserve_cli.controller.reconcile.mappers import token_of

SERVICE = "check"
MOST_PLACES = 4  # that are tried while clouds refuse
POLL_S = 3.0
LAUNCH_PATIENCE_S = 180.0
BOOT_PATIENCE_S = 1500.0
RESPONSE_PATIENCE_S = 120.0
END_PATIENCE_S = 900.0
_ADMIT_EVERY_S = 2.0

OnStep = Callable[[str], None]
Fetch = Callable[[str, str], str]  # an endpoint and its machine's token -> the body; raises OSError

T = TypeVar("T")

_RUN = (
    'mkdir -p www && echo "$SKYSERVE_CHECK" >www/index.html && cd www && '
    'exec python3 -m http.server --bind 0.0.0.0 "$SKYSERVE_REPLICA_PORT"'
)


@dataclass(frozen=True, slots=True)
class CheckStep:
    """What was tried, how long it took, and why it failed ("" if it did not)."""

    what: str
    seconds: float
    problem: str = ""


@dataclass(slots=True)
class CheckReport:
    """`usd` is about what the machine cost, `left` what could not be removed, a sentence each."""

    cloud: str
    offer: Offer | None = None
    steps: list[CheckStep] = field(default_factory=list)
    usd: float = 0.0
    left: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return bool(self.steps) and not self.left and not any(step.problem for step in self.steps)


class _FailedError(Exception):
    """A step did not succeed."""


class LaunchCheck:
    """Of one cloud, with an owner that nothing else has. `now` is UNIX seconds."""

    def __init__(
        self,
        cloud: VmProvisioner,
        owner: str,
        fetch: Fetch,
        *,
        now: Callable[[], float],
        sleep: Callable[[float], None],
        on_step: OnStep = lambda sentence: None,
    ) -> None:
        self._cloud = cloud
        self._owner = owner
        self._fetch = fetch
        self._now = now
        self._sleep = sleep
        self._on_step = on_step
        self._report = CheckReport(cloud.name)
        self._settles_at = now() + CONSISTENT_AFTER_S

    def run(self, offers: Sequence[Offer]) -> CheckReport:
        """Try the offers in their order until one is accepted.

        Never raises ProvisionError; KeyboardInterrupt only after the machine has been terminated.
        """
        report = self._report
        launched_at: float | None = None
        try:
            with self._gate(), suppress(_FailedError):
                instance = self._step("launch", lambda: self._launch(offers))
                launched_at = self._now()
                instance = self._step("boot, ssh and setup", lambda: self._await_running(instance))
                self._step("response", lambda: self._await_response(instance))
        finally:
            with suppress(_FailedError):
                self._step("removal", self._remove_all)
            if launched_at is not None and report.offer is not None:
                report.usd = report.offer.price_usd_hour * (self._now() - launched_at) / 3600.0
        return report

    def remove(self) -> tuple[str, ...]:
        """Remove what an earlier check has left; what could not be removed."""
        with suppress(_FailedError):
            self._remove_all()
        return self._report.left

    # --- steps

    def _step(self, what: str, do: Callable[[], T]) -> T:
        self._on_step(what)
        began = self._now()
        try:
            done = do()
        except (_FailedError, ProvisionError) as error:
            self._report.steps.append(CheckStep(what, self._now() - began, str(error)))
            raise _FailedError(str(error)) from error
        self._report.steps.append(CheckStep(what, self._now() - began))
        return done

    @contextmanager
    def _gate(self) -> Iterator[None]:
        """Let this host in for as long as the machine runs."""
        cloud, stop = self._cloud, threading.Event()
        if not isinstance(cloud, Gated):
            yield
            return

        def admit() -> None:
            while not stop.is_set():
                with suppress(ProvisionError):  # the launch names the problem
                    cloud.admit(self._owner, {})
                stop.wait(_ADMIT_EVERY_S)

        thread = threading.Thread(target=admit, daemon=True, name="check-admission")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(60.0)

    def _launch(self, offers: Sequence[Offer]) -> Instance:
        if not offers:
            raise _FailedError("the cloud offers no such machine")
        refusals: list[str] = []
        for number, offer in enumerate(offers[:MOST_PLACES], 1):
            self._report.offer = offer
            self._on_step(f"launching {offer.instance_type} in {offer.zone}")
            try:
                return self._launched(self._order(number, offer))
            except (CapacityError, QuotaError, RefusedError) as error:
                refusals.append(str(error))
        raise _FailedError("; ".join(refusals))

    def _launched(self, order: LaunchOrder) -> Instance:
        until = self._now() + LAUNCH_PATIENCE_S
        while True:
            self._settles_at = self._now() + CONSISTENT_AFTER_S
            try:
                return self._cloud.launch(order)
            except TransientError as error:
                if self._now() >= until:
                    raise
                self._sleep(min(30.0, max(POLL_S, error.retry_after_s)))

    def _order(self, number: int, offer: Offer) -> LaunchOrder:
        token = token_of(self._owner, SERVICE, "launch", number, offer)
        return LaunchOrder(
            token=token,
            owner=self._owner,
            service=SERVICE,
            replica_id=number,
            version=1,
            offer=offer,
            setup=None,
            run=_RUN,
            env={"SKYSERVE_CHECK": token},
        )

    def _await_running(self, instance: Instance) -> Instance:
        until, doing = self._now() + BOOT_PATIENCE_S, ""
        while self._now() < until:
            found = self._look(instance.token)
            if found is not None and found.state is InstanceState.RUNNING and found.endpoint:
                return found
            if found is not None and (found.state.is_gone or found.state in _FAILED):
                raise _FailedError(
                    f"the machine is {found.state.value}: {found.message or 'no reason is known'}"
                )
            if found is not None and found.message != doing:
                doing = found.message
                self._on_step(doing)
            self._sleep(POLL_S)
        raise _FailedError(
            f"not running after {BOOT_PATIENCE_S:.0f} s; last: {doing or 'nothing was reported'}"
        )

    def _await_response(self, instance: Instance) -> None:
        until, problem = self._now() + RESPONSE_PATIENCE_S, ""
        while self._now() < until:
            try:
                if instance.token in self._fetch(instance.endpoint or "", instance.token):
                    return
                problem = "it is not the machine's own page"
            except OSError as error:
                problem = str(error) or type(error).__name__
            self._sleep(POLL_S)
        raise _FailedError(f"no response from {instance.endpoint}: {problem}")

    def _look(self, token: str) -> Instance | None:
        with suppress(TransientError):
            return next((one for one in self._cloud.instances(self._owner) if one.token == token), None)
        return None

    # --- removal

    def _remove_all(self) -> None:
        """Machines first, what they left next, what they shared last."""
        until = self._now() + END_PATIENCE_S
        self._report.left = ("leftovers are unknown",)
        while True:
            self._report.left = self._removed()
            if not self._report.left:
                return
            if self._now() >= until:
                raise _FailedError("; ".join(self._report.left))
            self._sleep(POLL_S)

    def _removed(self) -> tuple[str, ...]:
        """Return one round; sentences of what there still is."""
        cloud, owner = self._cloud, self._owner
        try:
            alive = [one for one in cloud.instances(owner) if not one.state.is_gone]
            for one in alive:
                if one.state is not InstanceState.STOPPING:
                    cloud.terminate(one)
            if alive:
                return tuple(f"machine {one.id} in {one.zone}" for one in alive)
            if self._now() < self._settles_at:  # a launch whose response was lost may have made one
                return ("a machine that the cloud does not list yet, perhaps",)
            for leftover in cloud.machines.orphans(owner):
                cloud.machines.remove(leftover)
            return (
                *cloud.delete_shared(owner),
                *(f"{one.kind} {one.id} in {one.region}" for one in cloud.machines.orphans(owner)),
            )
        except ProvisionError as error:
            return (str(error),)


_FAILED = frozenset({InstanceState.SETUP_FAILED, InstanceState.RUN_EXITED, InstanceState.BROKEN})
