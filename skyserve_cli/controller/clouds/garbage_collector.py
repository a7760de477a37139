"""Finds what belongs to nothing we know (`leaks`), and removes it. For the daemon's sweeps, `serve down` and `serve gc`.

Nothing of this is written down: a process that is killed in the middle leaves the rest to the next one, which finds it by its tag.
One at a time looks after a cloud.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from provisioners.port.base import Provisioner
from provisioners.port.errors import ProvisionError, RegionClosedError, TransientError
from provisioners.port.vm import Renting
from skyserve_cli.clouds import CloudNotEnabledError, Clouds
from skyserve_cli.controller.clouds import orphans as leaks
from skyserve_cli.controller.clouds.caches import SpecCache
from skyserve_cli.controller.clouds.orphans import KnownInstances, Orphan, Part
from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.controller.reconcile.mappers import known_tokens, requirements_of
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import EventRecord, ServiceRow

log = logging.getLogger(__name__)

AGAIN_S = 10.0  # between the two times that a leftover must be seen before it is removed without a question
PATIENCE_S = 60.0  # with a region that does not respond, until it is reported as a problem

_NOT_LEADING = "this controller's lease is not confirmed"

Key = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Unlisted:
    """A region, or ("") a whole cloud, that could not be listed. `passes`: it may respond another time."""

    cloud: str
    region: str
    why: str
    passes: bool

    def __str__(self) -> str:
        return f"{self.cloud}{'/' * bool(self.region)}{self.region} cannot be listed: {self.why}"

    def may_have(self, places: Collection[str] | None) -> bool:
        """Return whether an unlisted instance may be in one of these regions or zones. Some clouds name several at once."""
        return places is None or not self.region or any(place in self.region for place in places)


@dataclass(frozen=True, slots=True)
class CloudFindings:
    """One cloud, as it was just found.

    `is_empty`: no instance of ours is there. `is_withheld`: there is something that machines share, and as not every
    region has said that it has none, it is unknown whether it is needed.
    """

    orphans: tuple[Orphan, ...]
    unlisted: tuple[Unlisted, ...]
    is_empty: bool
    is_withheld: bool = False

    def of(self, part: Part) -> list[Orphan]:
        return [orphan for orphan in self.orphans if orphan.part is part]

    def view(self) -> dict[str, Any]:
        return {
            "orphans": [orphan.view() for orphan in self.orphans],
            "unlisted": [asdict(one) for one in self.unlisted],
        }


@dataclass(frozen=True, slots=True)
class Collected:
    """What came of tidying. `waiting` and `problems` are sentences: operations under way, and those that need a user."""

    removed: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def __add__(self, other: Collected) -> Collected:
        return Collected(
            self.removed + other.removed, self.waiting + other.waiting, self.problems + other.problems
        )

    def view(self) -> dict[str, Any]:
        return {"removed": self.removed, "waiting": self.waiting, "problems": self.problems}


@dataclass(frozen=True, slots=True)
class RemovalFailure:
    """Why something could not be removed; "" if it was. `passes`: it may be another time."""

    why: str = ""
    passes: bool = False

    def view(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class _Notes:
    """The memory of a cloud from one look to the next."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    ends: dict[Key, Callable[[], None]] = field(default_factory=dict)  # how to remove what was found
    seen: dict[Key, float] = field(default_factory=dict)  # leftovers, and when they were first seen
    silent: dict[str, float] = field(default_factory=dict)  # regions, and since when they are
    reported: tuple[str, ...] = ()


class GarbageCollector:
    """Thread-safe.

    `known` reads the rows when it is called; see `leaks` for why that matters. `allows` says right before something is
    removed whether this process may.
    """

    def __init__(
        self,
        provisioners: Callable[[str], Provisioner],
        owner: str,
        known: Callable[[], KnownInstances],
        clock: Clock,
        record: Callable[[EventRecord], None],
        allows: Callable[[], bool] = lambda: True,
    ) -> None:
        self._provisioners = provisioners
        self._owner = owner
        self._known = known
        self._clock = clock
        self._record = record
        self._allows = allows
        self._notes: dict[str, _Notes] = {}

    def rents(self, cloud: str) -> bool:
        """Return whether there can be anything but instances."""
        return isinstance(self._provisioners(cloud), Renting)

    def inspect(self, cloud: str) -> CloudFindings:
        """Return the resources there. A region that does not respond is named, the others are listed."""
        notes = self._notes_of(cloud)
        with notes.lock:
            unlisted: list[Unlisted] = []

            def silent(region: str, error: ProvisionError) -> None:
                if isinstance(error, RegionClosedError):
                    return  # nothing can be made there, and what there may be of before is out of our reach
                unlisted.append(
                    Unlisted(cloud, region, error.message, passes=isinstance(error, TransientError))
                )

            try:
                orphans, is_empty = self._orphans(cloud, silent)
            except ProvisionError as error:
                silent("", error)
                orphans, is_empty = {}, False
            notes.ends = {orphan.key: end for orphan, end in orphans.items() if end is not None}
            if not unlisted:
                return CloudFindings(tuple(orphans), (), is_empty)
            distinct = {(one.region, one.why): one for one in unlisted}
            sure = tuple(orphan for orphan in orphans if orphan.part is not Part.SHARED)
            return CloudFindings(
                sure, tuple(distinct.values()), is_empty=False, is_withheld=len(sure) < len(orphans)
            )

    def remove(self, key: Key) -> RemovalFailure:
        """End an instance, or remove a leftover, that a look has found.

        Already gone is success; of an instance it is the order that is given, not the end that is awaited. What was an
        orphan has stayed one: no token is used twice.
        """
        cloud = key[0]
        notes = self._notes_of(cloud)
        with notes.lock:
            if key not in notes.ends:
                self.inspect(cloud)  # another process may have found it
            end = notes.ends.get(key)
            if end is None:
                return RemovalFailure()
            if not self._allows():
                return RemovalFailure(_NOT_LEADING, passes=True)
            try:
                end()
            except ProvisionError as error:
                return RemovalFailure(error.message, passes=isinstance(error, TransientError))
            del notes.ends[key]
            _, kind, name, region = key
            self._record_removed(f"{kind} {name} in {cloud}/{region}, which belonged to nothing")
            return RemovalFailure()

    def forget(self, cloud: str) -> Sequence[str]:
        """Remove what machines share, unless a service could want it. Returns sentences about leftovers, and why."""
        notes = self._notes_of(cloud)
        with notes.lock:
            provisioner = self._provisioners(cloud)
            if not isinstance(provisioner, Renting):
                return ()
            if cloud in self._known().clouds:
                return (f"a service uses {cloud}, so nothing that machines share is removed",)
            if not self._allows():
                return (_NOT_LEADING,)
            try:
                problems = provisioner.delete_shared(self._owner)
            except ProvisionError as error:
                return (error.message,)
            if not problems:
                self._record_removed(
                    f"all that machines in {cloud} shared: none is left, and no service needs it"
                )
            return problems

    def tidy(
        self, cloud: str, services: Iterable[str] | None = None, places: Collection[str] | None = None
    ) -> Collected:
        """Remove leftovers seen for the second time, and in the end what machines share.

        What machines share goes once no instance is left and no service needs anything. Instances are terminated by the tick, and waited for here: those of these services (None: of all). So are regions that
        do not respond: those that have any of these places (names of regions and zones) in them (None: all).
        """
        notes = self._notes_of(cloud)
        with notes.lock:
            look = self.inspect(cloud)
            wanted = None if services is None else frozenset(services)
            alive = [one for one in look.of(Part.INSTANCE) if wanted is None or one.service in wanted]
            self._note(notes, look)
            awaited = [one for one in look.unlisted if look.is_withheld or one.may_have(places)]
            patient = [one for one in awaited if one.passes and self._is_new(notes, one)]
            done = Collected(
                waiting=(*(f"{orphan} is not gone yet" for orphan in alive), *map(str, patient)),
                problems=tuple(str(one) for one in awaited if one not in patient),
            )
            for leftover in look.of(Part.LEFTOVER):
                done += self._remove_if_seen_twice(notes, leftover)
            if look.is_empty and look.of(Part.SHARED) and not done.waiting and not done.problems:
                done += self._forget(cloud, look.of(Part.SHARED))
            self._record_problems(notes, done.problems)
            return done

    # --- inside

    def _notes_of(self, cloud: str) -> _Notes:
        return self._notes.setdefault(cloud, _Notes())

    def _orphans(
        self, cloud: str, silent: Callable[[str, ProvisionError], None]
    ) -> tuple[dict[Orphan, Callable[[], None] | None], bool]:
        """Return the orphans with how to remove each, and whether no instance is left.

        They are in an order in which they can be removed; what machines share is removed by `forget`.
        """
        provisioner = self._provisioners(cloud)
        orphans: dict[Orphan, Callable[[], None] | None] = {}
        if not isinstance(provisioner, Renting):
            instances = provisioner.instances(self._owner)
            for instance in leaks.stray_instances(instances, self._known()):
                orphans[leaks.of_instance(instance)] = partial(provisioner.terminate, instance)
            return orphans, all(one.state.is_gone for one in instances)
        rented = provisioner.machines
        machines = rented.machines(self._owner, silent)
        leftovers = rented.orphans(self._owner, silent)
        shared = rented.shared(self._owner, silent)
        known = self._known()  # after the cloud
        for machine in leaks.stray_machines(machines, known):
            orphan = leaks.of_machine(machine, provisioner.usd_hour(machine))
            orphans[orphan] = partial(rented.destroy, machine)
        for leftover in leaks.stray_leftovers(leftovers, known, self._clock.now()):
            orphans[leaks.of_leftover(cloud, Part.LEFTOVER, leftover)] = partial(rented.remove, leftover)
        if cloud not in known.clouds:
            orphans |= dict.fromkeys(leaks.of_leftover(cloud, Part.SHARED, one) for one in shared)
        return orphans, all(one.state.is_gone for one in machines)

    def _note(self, notes: _Notes, look: CloudFindings) -> None:
        """When each leftover was first seen, and since when each region has been silent; resolved ones are removed."""
        now = self._clock.now()
        notes.seen = {one.key: notes.seen.get(one.key, now) for one in look.of(Part.LEFTOVER)}
        notes.silent = {one.region: notes.silent.get(one.region, now) for one in look.unlisted}

    def _is_new(self, notes: _Notes, unlisted: Unlisted) -> bool:
        return self._clock.now() - notes.silent[unlisted.region] < PATIENCE_S

    def _remove_if_seen_twice(self, notes: _Notes, leftover: Orphan) -> Collected:
        if self._clock.now() - notes.seen[leftover.key] < AGAIN_S:
            return Collected(waiting=(f"{leftover} seems to be left over",))
        refusal = self.remove(leftover.key)
        if not refusal.why:
            return Collected(removed=(str(leftover),))
        sentence = f"{leftover} cannot be removed: {refusal.why}"
        return Collected(waiting=(sentence,)) if refusal.passes else Collected(problems=(sentence,))

    def _forget(self, cloud: str, shared: Sequence[Orphan]) -> Collected:
        problems = tuple(self.forget(cloud))
        return Collected(problems=problems) if problems else Collected(removed=tuple(map(str, shared)))

    def _record_removed(self, what: str) -> None:
        log.info("removed %s", what)
        self._record(EventRecord("Removed", what))

    def _record_problems(self, notes: _Notes, problems: tuple[str, ...]) -> None:
        """Those of this sweep, unless they are those of the last one."""
        if problems == notes.reported:
            return
        notes.reported = problems
        for problem in problems:
            log.warning("%s", problem)
            self._record(EventRecord("NotRemoved", problem))


def known_of(owner: str, rows: Iterable[ServiceRow], specs: SpecCache, clouds: Clouds) -> KnownInstances:
    """Return what these rows, all that are up or have a live replica, say that we know."""
    rows = list(rows)
    used = {replica.zone.cloud for row in rows for replica in row.attempts}
    for row in rows:
        if not row.down:
            need = requirements_of(specs.get(row.name, row.version))
            try:
                need = clouds.resolve(need)
            except CloudNotEnabledError:
                continue
            used |= {candidate.cloud for candidate in need.candidates if candidate.cloud is not None}
    return KnownInstances(known_tokens(owner, rows), frozenset(used))


def janitor_of(
    store: Store, specs: SpecCache, clouds: Clouds, clock: Clock, allows: Callable[[], bool] = lambda: True
) -> GarbageCollector:
    """Of one home."""
    owner = store.database.owner()
    return GarbageCollector(
        clouds.get,
        owner,
        lambda: known_of(owner, store.services(), specs, clouds),
        clock,
        lambda record: store.append_event(record, now=clock.now()),
        allows,
    )


class Sweeper(threading.Thread):
    """Tidies the clouds that rent, at the start and then every `every_s`."""

    def __init__(self, garbage_collector: GarbageCollector, clouds: Sequence[str], every_s: float) -> None:
        super().__init__(name="sweeper", daemon=True)
        self._garbage_collector = garbage_collector
        self._clouds = clouds
        self._every_s = every_s
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.is_set():
            for cloud in self._clouds:
                try:
                    if self._garbage_collector.rents(cloud):
                        self._garbage_collector.tidy(cloud)
                except Exception:  # a bug in a plug-in, or no database: the next sweep is another chance
                    log.exception("sweep of %s", cloud)
            self._stopping.wait(self._every_s)

    def stop(self) -> None:
        self._stopping.set()
