"""Prometheus metrics of one agent, in a registry of its own.

Names are `skyserve_lb_<noun>_<unit>[_total]`. Labels are bounded by construction: service, region, zone,
capacity_type, policy, and nothing that grows with traffic. Of request metrics `region` is the agent's own, of
target metrics the target's.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lb.targets import Standing, TargetTable
from lb.wire import Target

_AGENT = ("service", "region", "policy")
_TARGET = ("service", "region", "zone", "capacity_type", "policy")
_TTFB_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)


class Metrics:
    """Counters are written as things happen; gauges are read off the table when somebody asks."""

    def __init__(self, service: str, region: str) -> None:
        self._service = service
        self._region = region
        self._policy = ""
        self.registry = CollectorRegistry()

        def counter(name: str, help_text: str, labels: tuple[str, ...] = _AGENT) -> Counter:
            return Counter(f"skyserve_lb_{name}", help_text, labels, registry=self.registry)

        def gauge(name: str, help_text: str, labels: tuple[str, ...] = _AGENT) -> Gauge:
            return Gauge(f"skyserve_lb_{name}", help_text, labels, registry=self.registry)

        self._requests = counter("requests", "Requests that arrived, whatever became of them.")
        self._responses = {
            family: counter(f"responses_{family}xx", f"Answers to clients with a status of {family}xx.")
            for family in (1, 2, 3, 4, 5)
        }
        self._rejected = counter(
            "rejected_requests", "Requests turned away because no target could take them."
        )
        self._client_gone = counter("client_gone_requests", "Requests whose client left before the end.")
        self._cut = counter("cut_streams", "Answers that broke off after their first byte.")
        self._retries = counter("retries", "Attempts beyond a request's first.")
        self._moves = counter(
            "moves", "Waiting attempts called back because their target was lost or silent."
        )
        self._attempts = counter("attempts", "Attempts on targets.", _TARGET)
        self._failures = counter("failures", "Attempts on targets that failed.", _TARGET)
        self._ejections = counter("ejections", "Times a target was left out for its failures.", _TARGET)
        self._ttfb = Histogram(
            "skyserve_lb_time_to_first_byte_seconds",
            "From the arrival of a request to the first byte of its answer's body.",
            _TARGET,
            buckets=_TTFB_BUCKETS_S,
            registry=self.registry,
        )
        self._in_flight = gauge("in_flight_requests", "Requests on targets now.", _TARGET)
        self._held = gauge("held_requests", "Requests waiting for a target now.")
        self._targets = gauge("targets", "Targets in the table.", _TARGET)
        self._good_targets = gauge(
            "good_targets", "Targets in good standing: ready and not ejected.", _TARGET
        )

    def use_policy(self, name: str) -> None:
        """Label what follows with this policy. The unlabelled families appear at once, with zeros."""
        self._policy = name
        plain = (self._requests, self._rejected, self._client_gone, self._cut, self._retries, self._moves)
        for family in (*plain, *self._responses.values()):
            family.labels(*self._agent)

    def request(self) -> None:
        self._requests.labels(*self._agent).inc()

    def response(self, status: int) -> None:
        family = self._responses.get(status // 100)
        if family is not None:
            family.labels(*self._agent).inc()

    def rejected(self) -> None:
        self._rejected.labels(*self._agent).inc()

    def client_gone(self) -> None:
        self._client_gone.labels(*self._agent).inc()

    def cut(self) -> None:
        self._cut.labels(*self._agent).inc()

    def attempt(self, target: Target, first: bool) -> None:
        self._attempts.labels(*self._of(target)).inc()
        if not first:
            self._retries.labels(*self._agent).inc()

    def moved(self) -> None:
        self._moves.labels(*self._agent).inc()

    def failed(self, target: Target) -> None:
        self._failures.labels(*self._of(target)).inc()

    def ejected(self, target: Target) -> None:
        self._ejections.labels(*self._of(target)).inc()

    def first_byte(self, target: Target, after_s: float) -> None:
        self._ttfb.labels(*self._of(target)).observe(after_s)

    def expose(self, table: TargetTable, held: int, now: float) -> bytes:
        """The text exposition format."""
        for family in (self._in_flight, self._targets, self._good_targets):
            family.clear()
        for target, standing, in_flight in table.rows(now):
            labels = self._of(target)
            self._in_flight.labels(*labels).inc(in_flight)
            self._targets.labels(*labels).inc()
            self._good_targets.labels(*labels).inc(1 if standing is Standing.GOOD else 0)
        self._held.labels(*self._agent).set(held)
        return generate_latest(self.registry)

    @property
    def _agent(self) -> tuple[str, str, str]:
        return self._service, self._region, self._policy

    def _of(self, target: Target) -> tuple[str, str, str, str, str]:
        return self._service, target.region, target.zone, target.capacity_type, self._policy
