"""Keeps the firewalls of rented machines: only the controller and the load balancers may open a replica's port.

A thread per cloud, level-triggered like all that touches clouds: each tick says which load balancers there are, and the cloud's
rules are brought to that. The present rules are read from the cloud each time, so a controller that was killed half-way leaves
nothing that the next one does not find. The rules follow this host's own address, too (`provisioners.own_address`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from policies.backoff import delay_s
from provisioners.port.base import Gated
from provisioners.port.errors import ProvisionError
from skyserve_cli.controller.reconcile.clock import Clock

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0  # for an address of ours that is another one
FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0

Balancers = Mapping[str, frozenset[str]]
"""By service, the addresses of its load balancers' machines."""


class ThreadFirewalls:
    """The daemon's.

    `clouds` are the names of all that are enabled, `gated` gives each one's provisioner if it has a firewall. `allows`:
    this controller may change something now. `report` gets what cannot be changed, by cloud, when that is another thing than
    before; an empty sentence says that it could be changed again.
    """

    def __init__(
        self,
        clouds: Sequence[str],
        gated: Callable[[str], Gated | None],
        owner: str,
        clock: Clock,
        allows: Callable[[], bool] = lambda: True,
        report: Callable[[str, str], None] = lambda cloud, sentence: None,
    ) -> None:
        self._gated = gated
        self._owner = owner
        self._clock = clock
        self._allows = allows
        self._report = report
        self._clouds = tuple(clouds)
        self._balancers: Balancers | None = None  # nothing is known before the first tick
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def ensure(self, balancers: Balancers) -> None:
        """These may open replicas' ports. Returns at once."""
        with self._changed:
            if balancers != self._balancers:
                self._balancers = dict(balancers)
                self._changed.notify_all()
        if not self._threads:
            for cloud in self._clouds:
                thread = threading.Thread(target=self._live, args=(cloud,), name=f"gate-{cloud}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _live(self, cloud: str) -> None:
        failures, not_before, logged = 0, float("-inf"), ""
        last: Balancers | None = None
        while True:
            with self._changed:
                if self._balancers is last:
                    self._changed.wait(LOOK_EVERY_S)
                balancers = self._balancers
            is_new, last = balancers is not last, balancers
            if balancers is None or not self._allows() or (not is_new and self._clock.now() < not_before):
                continue
            sentence = self._admit(cloud, balancers)
            failures = failures + 1 if sentence else 0
            not_before = self._clock.now() + (
                delay_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S) if sentence else 0.0
            )
            if sentence != logged:
                log.warning("%s: rules for the network: %s", cloud, sentence or "as they should be again")
                self._report(cloud, sentence)
                logged = sentence

    def _admit(self, cloud: str, balancers: Balancers) -> str:
        """Return why it cannot be done, or nothing."""
        try:
            gate = self._gated(cloud)
            if gate is not None:
                gate.admit(self._owner, balancers)
        except ProvisionError as error:
            return error.message
        except Exception as error:  # a bug in the plug-in must not end this thread
            log.exception("rules for the network of %s", cloud)
            return f"{type(error).__name__}: {error}"
        return ""
