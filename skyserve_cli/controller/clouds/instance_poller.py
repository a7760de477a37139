"""Polls the clouds: one thread per cloud lists our instances over and over.

Between two listings it reads what machines have reported as soon as they report it. A preemption notice of 30 seconds must
not wait for the next listing.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping

from provisioners.port.base import Instance, InstanceList, Provisioner, RegionalSource, ReportSource
from provisioners.port.errors import AuthError, ProvisionError, TransientError
from provisioners.port.vm import Renting
from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.controller.reconcile.leases import LeaseWatch, Warn
from skyserve_cli.controller.reconcile.listing_events import same_objects
from skyserve_cli.controller.reconcile.ports import InstanceListing

log = logging.getLogger(__name__)

DEFAULT_POLL_S = 10.0
LOCAL = "local"  # the cloud of processes on this machine, which needs no network
PATIENCE = 3  # listings that fail in a row until it is reported
BURST_S = 0.05  # reports of many machines that come so close together are read at once


class ThreadInstancePoller:
    """The daemon's witness.

    `poll_s` by cloud; the tick is woken only when a listing differs from the last. `report` takes a sentence for the event
    log, `warn` one about a replica, `tell_clock` one about a cloud's clock.
    """

    def __init__(
        self,
        provisioners: Callable[[str], Provisioner],
        owner: str,
        clock: Clock,
        wake: Callable[[], None],
        poll_s: Mapping[str, float],
        report: Callable[[str], None] = lambda sentence: None,
        warn: Warn = lambda service, replica_id, sentence: None,
        report_clock: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._provisioners = provisioners
        self._owner = owner
        self._clock = clock
        self._wake = wake
        self._poll_s = poll_s
        self._report = report
        self._warn = warn
        self._report_clock = report_clock
        self._off: set[str] = set()  # clouds whose clocks are not ours
        self._leases: dict[str, LeaseWatch] = {}
        self._silent: dict[tuple[str, str], int] = {}  # by cloud and place: listings in a row without it
        self._closed: set[tuple[str, str]] = set()  # those that were reported
        self._seen: queue.SimpleQueue[InstanceListing] = queue.SimpleQueue()
        self._watched: frozenset[str] = frozenset()
        self._threads: dict[str, threading.Thread] = {}
        self._last: dict[str, tuple[Instance, ...]] = {}
        self._trouble: dict[str, str] = {}
        self._listed_at: dict[str, float] = {}  # clouds beyond this machine
        self._stop = threading.Event()
        self._fleets: dict[str, Renting] = {}  # as last listed
        self._reports: dict[str, threading.Event] = {}  # by cloud: set when a machine of it has reported

    def watch(self, clouds: frozenset[str]) -> None:
        self._watched = clouds
        for cloud in clouds - self._threads.keys():
            self._reports[cloud] = threading.Event()
            self._leases[cloud] = LeaseWatch(self._warn)
            thread = threading.Thread(target=self._poll, args=(cloud,), daemon=True, name=f"witness-{cloud}")
            self._threads[cloud] = thread
            thread.start()

    def drain(self) -> list[InstanceListing]:
        listings = []
        while not self._seen.empty():
            listings.append(self._seen.get())
        return listings

    def last(self, cloud: str) -> tuple[Instance, ...]:
        """Return what the last listing of the cloud showed; nothing before the first. Safe from any thread."""
        return self._last.get(cloud, ())

    def machines(self, cloud: str) -> Mapping[str, Instance]:
        """Return those of the last listing of which status shows more than their replicas', by id. Safe from any thread."""
        watch = self._leases.get(cloud)
        return {} if watch is None else watch.by_id

    def trouble(self) -> Mapping[str, str]:
        """Return why clouds cannot be listed, by cloud."""
        return dict(self._trouble)

    def reached_at(self) -> float | None:
        """Return when a cloud last listed its instances; None if only this machine's are listed."""
        if not self._watched - {LOCAL}:
            return None
        return max(self._listed_at.copy().values(), default=float("-inf"))

    def close(self) -> None:
        self._stop.set()
        for report in self._reports.values():
            report.set()

    def _poll(self, cloud: str) -> None:
        failures = 0
        while not self._stop.is_set():
            if cloud in self._watched:
                failures = self._look(cloud, failures)
            self._await_next_listing(cloud)

    def _look(self, cloud: str, failures: int) -> int:
        """List a cloud, after so many failures in a row. Returns how many there are now."""
        asked_at = self._clock.now()
        try:
            provisioner = self._provisioners(cloud)
            if isinstance(provisioner, Renting):
                self._fleets[cloud] = provisioner
            if isinstance(provisioner, ReportSource):
                provisioner.on_report(self._reports[cloud].set)
            listing = self._listing(provisioner)
        except ProvisionError as error:
            # What passes by itself is not reported at once; a login does not recover by itself.
            if isinstance(error, AuthError) or failures + 1 >= PATIENCE:
                self._complain(cloud, error.message)
            return failures + 1
        except OSError as error:  # of the local cloud: a full disk of this machine
            if failures + 1 >= PATIENCE:
                self._complain(cloud, error.strerror or str(error))
            return failures + 1
        except Exception:  # a bug in a plug-in must not blind us to the cloud for good
            log.exception("listing %s", cloud)
            return failures
        self._take(cloud, provisioner, listing, asked_at)
        return 0

    def _take(self, cloud: str, provisioner: Provisioner, listing: InstanceList, asked_at: float) -> None:
        instances = same_objects(self._last.get(cloud, ()), listing.instances)
        if cloud != LOCAL:
            self._listed_at[cloud] = self._clock.now()
        silent, closed = frozenset(listing.silent), frozenset(listing.closed)
        self._seen.put(InstanceListing(cloud, asked_at, instances, silent=silent, closed=closed))
        is_news = self._note_regions(cloud, listing)
        self._note_clock(cloud, provisioner)
        is_news |= self._leases[cloud].observe(instances, self._clock.now())
        is_news |= self._trouble.pop(cloud, None) is not None
        if is_news or instances != self._last.get(cloud):
            self._last[cloud] = instances
            self._wake()

    def _listing(self, provisioner: Provisioner) -> InstanceList:
        if isinstance(provisioner, RegionalSource):
            return provisioner.listing(self._owner)
        return InstanceList(provisioner.instances(self._owner))

    def _note_regions(self, cloud: str, listing: InstanceList) -> bool:
        """Report regions and zones that do not respond, as for clouds, and once each that is closed.

        Returns whether a region that did not respond does so again.
        """
        for region, sentence in listing.closed.items():
            if (cloud, region) not in self._closed:
                self._closed.add((cloud, region))
                log.warning("%s/%s is left out: %s", cloud, region, sentence)
                self._report(f"{cloud}/{region} is left out: {sentence}")
        for place, error in listing.silent.items():
            failures = self._silent[cloud, place] = self._silent.get((cloud, place), 0) + 1
            if failures >= PATIENCE or not isinstance(error, TransientError):
                self._complain(f"{cloud}/{place}", error.message)
        back = [key for key in self._silent if key[0] == cloud and key[1] not in listing.silent]
        for key in back:
            del self._silent[key]
            self._trouble.pop("/".join(key), None)
        return bool(back)

    def _note_clock(self, cloud: str, provisioner: Provisioner) -> None:
        """Report once a cloud whose clock differs from ours, and again after it has been right."""
        warning = provisioner.clock_warning() if isinstance(provisioner, Renting) else ""
        if warning and cloud not in self._off:
            log.warning("%s: %s", cloud, warning)
            self._report_clock(f"{cloud}: {warning}")
        (self._off.add if warning else self._off.discard)(cloud)

    def _await_next_listing(self, cloud: str) -> None:
        """Read what machines report meanwhile."""
        report, listed_at = self._reports[cloud], self._clock.now()
        left_s = self._pause_s(cloud)
        while left_s > 0 and report.wait(left_s) and not self._stop.wait(BURST_S):
            report.clear()
            if cloud in self._watched:
                self._read_reports(cloud)
            left_s = min(left_s, listed_at + self._pause_s(cloud) - self._clock.now())

    def _pause_s(self, cloud: str) -> float:
        """Between two listings: as configured, or as the cloud's limits and operations under way there suggest."""
        if cloud in self._poll_s:
            return self._poll_s[cloud]
        fleet = self._fleets.get(cloud)
        return DEFAULT_POLL_S if fleet is None else fleet.poll_s()

    def _read_reports(self, cloud: str) -> None:
        asked_at = self._clock.now()
        try:
            provisioner = self._provisioners(cloud)
            if isinstance(provisioner, ReportSource):
                instances = tuple(provisioner.reported(self._owner))
                self._seen.put(InstanceListing(cloud, asked_at, instances, is_listing=False))
                self._wake()
        except Exception:  # a bug in a plug-in; the next listing shows the same
            log.exception("reading reports of %s", cloud)

    def _complain(self, cloud: str, sentence: str) -> None:
        if self._trouble.get(cloud) != sentence:
            log.warning("cannot list %s: %s", cloud, sentence)
            self._trouble[cloud] = sentence
            self._wake()
