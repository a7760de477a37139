"""Two look-ups the tick may use without waiting: the specs of stored versions, and the offers of the clouds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from lb.config.options import Access, ApiKey
from policies.model import Offer, Role
from provisioners.offers.matching import in_order
from provisioners.port.base import LaunchOrder, Provisioner, Requirements
from provisioners.port.errors import ProvisionError
from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.controller.reconcile.mappers import agent_order_of, order_of, token_of
from skyserve_cli.controller.reconcile.ports import CloudOperation
from skyserve_cli.controller.secret_box import SecretBox
from skyserve_cli.spec import spec_from_json
from skyserve_cli.spec.model import LoadBalancerSpec, Probe, ServiceSpec
from skyserve_cli.state.store import Store

log = logging.getLogger(__name__)

OFFERS_TTL_S = 60.0


class SpecCache:
    """Specs by (service, version): immutable once stored, so kept for good."""

    def __init__(
        self,
        store: Store,
        seal: SecretBox,
        admin_token: Callable[[str], str] = lambda token: "",
        path_of: Callable[[str], str] = lambda source: source,
    ) -> None:
        """`admin_token` is that of the load balancer agent on the machine of a launch token; `path_of` finds uploaded files."""
        self._store = store
        self._seal = seal
        self._admin_token = admin_token
        self._path_of = path_of
        self._specs: dict[tuple[str, int], ServiceSpec] = {}
        self._troubles: dict[tuple[str, int], str] = {}
        self._probes: dict[tuple[str, int], Probe] = {}

    def get(self, service: str, version: int) -> ServiceSpec:
        """Return the spec; one that no client can call if the stored one cannot be read (see `trouble`)."""
        key = service, version
        if key not in self._specs:
            stored = self._store.version(service, version).spec
            try:
                self._specs[key] = spec_from_json(dict(stored))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                said = "; ".join(str(error).splitlines()) or type(error).__name__
                self._troubles[key] = f"version {version} cannot be read ({said})"
                self._specs[key] = _stand_in(service)
        return self._specs[key]

    def trouble(self, service: str, version: int) -> str:
        """Return why the stored spec cannot be read; "": it can."""
        self.get(service, version)
        return self._troubles.get((service, version), "")

    def probe(self, service: str, version: int) -> Probe:
        key = service, version
        if key not in self._probes:
            spec = self.get(service, version)
            self._probes[key] = (
                spec.probe.resolved(self.secrets(service, version)) if spec.secrets else spec.probe
            )
        return self._probes[key]

    def secrets(self, service: str, version: int) -> dict[str, str]:
        """Return the secrets in clear: for a launch or a probe, never to be kept or shown."""
        if not self.get(service, version).secrets:
            return {}
        return self._seal.open(self._store.version(service, version).sealed_secrets)

    def order(self, owner: str, call: CloudOperation) -> LaunchOrder:
        version = call.replica.version
        spec = self.get(call.service, version)
        if call.replica.role is Role.LOAD_BALANCER:
            token = token_of(owner, call.service, call.incarnation, call.replica.id, call.replica.offer)
            admin_token = self._admin_token(token)
            return agent_order_of(owner, call.service, call.incarnation, call.replica, spec, admin_token)
        secrets = self.secrets(call.service, version)
        order = order_of(owner, call.service, call.incarnation, call.replica, spec, secrets, call.team)
        return replace(
            order,
            workdir=None if order.workdir is None else self._path_of(order.workdir),
            file_mounts={target: self._path_of(source) for target, source in order.file_mounts.items()},
        )


def _stand_in(service: str) -> ServiceSpec:
    """Return what is enough to terminate the machines of a service. It has a key that does not exist, for those it had."""
    closed = Access((ApiKey("none", "0" * 64),))
    return ServiceSpec(service, run="false", load_balancer=LoadBalancerSpec(access=closed))


class OfferCache:
    """Offers by requirements, refreshed in the background."""

    def __init__(
        self,
        clouds: Sequence[Provisioner],
        clock: Clock,
        wake: Callable[[], None],
        *,
        ttl_s: float = OFFERS_TTL_S,
    ) -> None:
        self._clouds = clouds
        self._clock = clock
        self._wake = wake
        self._ttl_s = ttl_s
        self._known: dict[Requirements, tuple[float, tuple[Offer, ...]]] = {}
        self._asking: set[Requirements] = set()
        self._lock = threading.Lock()

    def get(self, need: Requirements) -> tuple[Offer, ...] | None:
        now = self._clock.now()
        with self._lock:
            known = self._known.get(need)
            stale = known is None or now - known[0] > self._ttl_s
            if stale and need not in self._asking:
                self._asking.add(need)
                threading.Thread(target=self._query, args=(need,), daemon=True, name="offers").start()
        return None if known is None else known[1]

    def _query(self, need: Requirements) -> None:
        try:
            offers = all_offers(self._clouds, need)
            with self._lock:
                self._known[need] = (self._clock.now(), offers)
        finally:
            with self._lock:
                self._asking.discard(need)
        self._wake()


def all_offers(clouds: Sequence[Provisioner], need: Requirements) -> tuple[Offer, ...]:
    """Return the offers of all clouds, best first: by price, or in the order of the candidates if that is wanted.

    A cloud that cannot be listed offers nothing now; the others still do.
    """

    def query(part: Requirements) -> list[Offer]:
        found: list[Offer] = []
        for cloud in clouds:
            try:
                found += cloud.offers(part)
            except ProvisionError as error:
                log.warning("no offers from %s: %s", cloud.name, error)
            except Exception:  # a bug in one plug-in must not keep the others from being used
                log.exception("offers of %s", cloud.name)
        return found

    return in_order(need, query)
