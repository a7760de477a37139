"""What load balancer agents have counted since it was last stored, by service. Values in, values out, behind one lock."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from lb.config.totals import Tally, Totals
from skyserve_cli.controller.reconcile.usage_buffer import UsageBuffer
from skyserve_cli.state.samples import BOUNDS_S, WHOLE, Sample, Slot, added, busiest, combined

#: An agent that is seen for the first time at this age or below has counted nothing that an earlier controller has stored.
NEW_S = 15.0


class TrafficBuffer:
    """One per daemon. Agents are added on the event loop, slots are taken on the thread that stores them.

    `usage` has what they have counted by API key and model.
    """

    def __init__(self) -> None:
        self.usage = UsageBuffer()
        self._lock = threading.Lock()
        self._samples: dict[str, dict[int, list[Slot]]] = {}

    def add(self, service: str, agent: int, slot: Slot) -> None:
        """`agent` is its number within the service."""
        with self._lock:
            self._samples.setdefault(service, {}).setdefault(agent, []).append(slot)

    def take(self) -> dict[str, Slot]:
        """Return what was added since the last call, by service."""
        with self._lock:
            taken, self._samples = self._samples, {}
        return {service: _together(list(agents.values())) for service, agents in taken.items()}


def _together(agents: list[list[Slot]]) -> dict[int, Sample]:
    """Return one slot of the slots of each agent."""
    keys = {key for slots in agents for slot in slots for key in slot}
    of_agents = (
        (key, [added(slot[key] for slot in slots if key in slot) for slots in agents]) for key in keys
    )
    return busiest({key: combined(samples) for key, samples in of_agents})


def increase(before: Totals | None, after: Totals) -> dict[int, Sample] | None:
    """Return what was counted between two readings of an agent, by replica; None where nothing says what was new.

    An agent that has been restarted counts from 0 again, so all that it reports is new; so it is at the first reading of
    one that has just started.
    """
    is_new = before is None or after.uptime_s < before.uptime_s
    if before is None and after.uptime_s > NEW_S:
        return None
    earlier = None if is_new else before
    keeps_bounds = after.bounds == BOUNDS_S
    found = {WHOLE: _sample(None if earlier is None else earlier.agent, after.agent, keeps_bounds)}
    for name, tally in after.targets.items():
        if name.isdigit() and (tally.requests or tally.in_flight):
            found[int(name)] = _sample(
                None if earlier is None else earlier.targets.get(name), tally, keeps_bounds
            )
    return found


def _sample(before: Tally | None, after: Tally, keeps_bounds: bool) -> Sample:
    if (
        before is None or before.requests > after.requests
    ):  # of a target: it has lost its place and got another one
        before = Tally._make((*[0] * 8, (0,) * len(after.ttft)))
    ttft = tuple(max(0, new - old) for old, new in zip(before.ttft, after.ttft, strict=False))
    grown = (max(0, new - old) for old, new in zip(before[2:-1], after[2:-1], strict=True))
    return Sample._make((1, after.in_flight, after.queued, *grown, ttft if keeps_bounds else ()))


def without_idle(slot: Mapping[int, Sample]) -> Slot:
    """Return the slot without replicas of which there is nothing to store."""
    return {key: each for key, each in slot.items() if key == WHOLE or each.requests or each.in_flight}
