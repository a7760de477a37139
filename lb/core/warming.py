"""Filling the cache of a new replica before it takes its share of the requests. Pure; `now` is an argument.

A sample of the prompts of the last minutes is kept, one a second at most. When a replica joins, the prefixes that most of them
share (`policies.warming`) are sent to it, one request for one token at a time, and the routing policy learns that it has them.
Until then it is offered only while no other good target has room (`lb.core.candidates`), so no request waits for it.

*What ends it.* All prefixes are done, the time is over, two requests in a row failed, no other good target is left, the replica
leaves or is ejected, or the agent drains. While requests wait, here or for that replica, no further prefix is sent.

*Whose prompts.* The sample is in memory only, in no log and in no metric. It is dropped when the API keys or the residency of the
service change. A prompt is sent only to replicas that serve all zones of its request (`lb.core.residency`) and its model, and
prompts of different API keys never make one prefix.

*What is new.* A target that joins the table is a new replica if its region is the agent's own or has had targets before. When a
whole region is taken over from a dead agent or given back, its replicas have long been warm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from enum import Enum
from typing import NamedTuple

from lb.config.schema import Table
from lb.core.residency import Zones, may_have
from policies.routing.base import RequestView
from policies.warming import Prompt, hottest

SAMPLE_EVERY_S = 1.0
SAMPLES = 256
SAMPLES_BYTES = 8 * 1024 * 1024
LARGEST_BYTES = 256 * 1024  # of a body that is sampled
SAMPLES_KEPT_S = 600.0
FAILURES = 2  # in a row

_NEVER = float("inf")


class PromptSample(NamedTuple):
    """A request of a client: its body as it came, and its prompt as the routing policies compare it."""

    at: float
    scope: str
    zones: Zones
    model: str
    path: bytes
    body: bytes
    prompt: bytes


class PromptSamples:
    """The prompts of a few requests of the last minutes. None is due before `due_at`."""

    def __init__(self, table: Table) -> None:
        self.due_at = -_NEVER
        self._samples: deque[PromptSample] = deque()
        self._bytes = 0
        self._rules: object = None
        self.apply(table)

    def __len__(self) -> int:
        return len(self._samples)

    def apply(self, table: Table) -> None:
        """Another table is in force. Whose prompts may go where could have changed: then what is known is dropped."""
        on = table.warming.seconds > 0.0
        rules = (
            on,
            table.residency,
            tuple((key.name, key.residency) for key in table.access.keys if key.residency),
        )
        if rules != self._rules:
            self._rules = rules
            self._samples.clear()
            self._bytes = 0
            self.due_at = -_NEVER if on else _NEVER

    def add(self, sample: PromptSample) -> None:
        """Keep the sample in place of the oldest ones."""
        self.due_at = sample.at + SAMPLE_EVERY_S
        if len(sample.body) > LARGEST_BYTES:
            return
        self._samples.append(sample)
        self._bytes += _size(sample)
        while self._bytes > SAMPLES_BYTES or len(self._samples) > SAMPLES:
            self._drop_oldest()

    def models(self) -> frozenset[str]:
        """Return the models that the sampled requests name."""
        return frozenset(one.model for one in self._samples)

    def steps(self, zones: Collection[str], foreign: Collection[str], now: float) -> list[WarmingStep]:
        """Return what a replica that serves those residency zones, and none of the `foreign` models, should compute, in order.

        This takes some 10 ms: replicas that are alike should have it made once.
        """
        while self._samples and self._samples[0].at < now - SAMPLES_KEPT_S:
            self._drop_oldest()
        samples = [one for one in self._samples if may_have(zones, one.zones) and one.model not in foreign]
        prefixes = hottest([Prompt(one.scope, one.prompt) for one in samples])
        return [WarmingStep(samples[one.sample], one.length, one.added) for one in prefixes]

    def _drop_oldest(self) -> None:
        self._bytes -= _size(self._samples.popleft())


class WarmingStep(NamedTuple):
    """The first `length` bytes of the prompt of a sample, `added` of which no step before it has."""

    sample: PromptSample
    length: int
    added: int

    def view(self) -> RequestView:
        """Return the prefix as a routing policy sees a request."""
        sample = self.sample
        path = sample.path.decode("latin-1")
        return RequestView("", "POST", path, prompt=sample.prompt[: self.length], scope=sample.scope)


class WarmingEnd(str, Enum):
    """Why the filling of a cache ended."""

    COMPLETE = "complete"
    TIME = "time"  # the time that the service gives it is over
    FAILED = "failed"  # the engine returns errors
    NEEDED = "needed"  # no other good target is left
    GONE = "gone"  # the target left the table, drains, is ejected or unhealthy
    STOPPED = "stopped"  # the agent drains, or the service has turned it off


class Surroundings(NamedTuple):
    """What a next step depends on.

    `ready`: the target is in the table, ready and not ejected; `others`: another target is good and its cache is not being
    filled; `pressed`: requests wait, for any target or for the first byte of this one; `stopping`: no cache is to be filled.
    """

    ready: bool = True
    others: bool = True
    pressed: bool = False
    stopping: bool = False


class WarmUp:
    """The filling of one target's cache, until `until`."""

    def __init__(self, steps: Sequence[WarmingStep], now: float, seconds: float) -> None:
        self.since = now
        self.until = now + seconds
        self.total = len(steps)
        self.done = 0
        self._left = deque(steps)
        self._sending = False
        self._failed = 0  # in a row

    def next(self, around: Surroundings, now: float) -> WarmingStep | WarmingEnd | None:
        """Return what to send now, why it is over, or None: nothing yet. What is returned to be sent must be `ended`."""
        if around.stopping:
            return WarmingEnd.STOPPED
        if not around.ready:
            return WarmingEnd.GONE
        if not around.others:
            return WarmingEnd.NEEDED
        if self._failed >= FAILURES:
            return WarmingEnd.FAILED
        if now >= self.until:
            return WarmingEnd.TIME
        if not self._left and not self._sending:
            return WarmingEnd.COMPLETE
        if self._sending or around.pressed:
            return None
        self._sending = True
        return self._left.popleft()

    def ended(self, succeeded: bool) -> None:
        """The request of the last step is over."""
        self._sending = False
        self.done += succeeded
        self._failed = 0 if succeeded else self._failed + 1


def new_replicas(before: Table, after: Table, added: Collection[str]) -> list[str]:
    """Return which of the targets that joined are new replicas, and not those of a region that changed hands."""
    if before.regions is None or after.regions is None:
        return list(added)
    known = {target.region for target in before.targets} | {after.regions.here}
    regions = {target.id: target.region for target in after.targets}
    return [target_id for target_id in added if regions.get(target_id) in known]


def _size(sample: PromptSample) -> int:
    return len(sample.body) + len(sample.prompt)
