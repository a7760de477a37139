"""Azure Resource Manager through its own SDK, with our patience instead of the SDK's.

The SDK's retries sleep on real time, up to ten times, and hold a thread meanwhile; they are off. `Arm.call` repeats a
few times with full jitter, as long as Azure wants us to wait for seconds and not for minutes, and lets nothing out but
the classes of `errors`. Azure counts reads, writes and deletes of a subscription by token buckets ("Understand how Azure
Resource Manager throttles requests": 250 reads and 25 a second, 200 of the others and 10 a second); every request waits
for its turn in ours, which are smaller. A 429 holds back all threads alike anyway: resource providers count, too.

One policy of the SDK stays: it registers a resource provider that the subscription has never used, which takes Azure a
minute, once.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from azure.core import AzureClouds, PipelineClient
from azure.core.credentials import TokenCredential
from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    ResourceNotFoundError,
)
from azure.core.pipeline import PipelineRequest, PipelineResponse
from azure.core.pipeline.policies import SansIOHTTPPolicy
from azure.core.rest import HttpRequest, HttpResponse
from azure.mgmt.compute import ComputeManagementClient
from azure.mgmt.compute.models import VirtualMachine
from azure.mgmt.network import NetworkManagementClient
from azure.mgmt.resource.resources import ResourceManagementClient

from policies.backoff import delay_s
from policies.model import CapacityType, Zone
from provisioners.azure.errors import AzureFailure, error_of
from provisioners.cloud_clock import CloudClock
from provisioners.port.errors import ProvisionError, TransientError
from provisioners.rate_limit import Rate, RateLimiter

_ATTEMPTS = 5
_BACKOFF_S = 1.0  # doubled by each attempt
_LONGEST_BACKOFF_S = 32.0
_PATIENCE_S = 30.0  # a longer wait is the caller's business
_PARALLEL_CALLS = 8
_CONNECT_TIMEOUT_S = 10
_READ_TIMEOUT_S = 60

# A 404 that means "the thing is not there", and not "you may not look" or "there is no such subscription".
_ABSENT = frozenset({"ResourceNotFound", "ResourceGroupNotFound", "NotFound"})

_READS = Rate(burst=200, per_s=20)
_CHANGES = Rate(burst=100, per_s=8)  # of PUT and DELETE each

T = TypeVar("T")


class _Listening(SansIOHTTPPolicy[Any, Any]):
    """Takes the time from all responses."""

    def __init__(self, clock: CloudClock) -> None:
        self._clock = clock

    def on_response(self, request: PipelineRequest[Any], response: PipelineResponse[Any, Any]) -> None:
        self._clock.set_from_header(response.http_response.headers.get("Date"))


class _Paced(SansIOHTTPPolicy[Any, Any]):
    """In the SDK's pipeline, since only there every request passes: the pages of a list, too."""

    def __init__(self, pacer: RateLimiter) -> None:
        self._pacer = pacer

    def on_request(self, request: PipelineRequest[Any]) -> None:
        method = request.http_request.method
        self._pacer.take_turn(method, _READS if method == "GET" else _CHANGES)


class Arm:
    """The clients of one subscription. Thread-safe.

    `cloud_setting` is of a sovereign cloud; `base_url` and `authentication_policy` are the SDK's own overrides, for servers without
    TLS, to which the SDK's default policy sends no token.
    """

    def __init__(
        self,
        subscription_id: str,
        credential: TokenCredential,
        *,
        base_url: str | None,
        cloud_setting: AzureClouds | None = None,
        authentication_policy: object | None,
        now: Callable[[], float],
        sleep: Callable[[float], None],
        rng: random.Random,
    ) -> None:
        self.subscription_id = subscription_id
        self._now = now
        self._sleep = sleep
        self._rng = rng
        self.clock = CloudClock(now)
        options: dict[str, Any] = {
            "base_url": base_url,
            "cloud_setting": cloud_setting,
            "retry_total": 0,
            "connection_timeout": _CONNECT_TIMEOUT_S,
            "read_timeout": _READ_TIMEOUT_S,
            "per_call_policies": [_Paced(RateLimiter(now, sleep)), _Listening(self.clock)],
        }
        if authentication_policy is not None:
            options["authentication_policy"] = authentication_policy
        self.compute = ComputeManagementClient(credential, subscription_id, **options)
        self.network = NetworkManagementClient(credential, subscription_id, **options)
        self.resources = ResourceManagementClient(credential, subscription_id, **options)
        self._public: PipelineClient[HttpRequest, HttpResponse] = PipelineClient(
            "https://", retry_total=0, connection_timeout=_CONNECT_TIMEOUT_S, read_timeout=_READ_TIMEOUT_S
        )
        self._slots = threading.BoundedSemaphore(_PARALLEL_CALLS)
        self._lock = threading.Lock()
        self._closed_until = 0.0

    def call(
        self, what: Callable[[], T], zone: Zone | None = None, capacity_type: CapacityType | None = None
    ) -> T:
        """Do one call of the SDK that may be repeated. Raises the classes of `errors` only."""
        for attempt in range(1, _ATTEMPTS + 1):
            self._await_turn()
            try:
                with self._slots:
                    return what()
            except AzureError as error:
                failure = _failure_of(error)
                ours = error_of(failure, self._now(), zone, capacity_type)
                if failure.status == 429:
                    self._hold_back(cast(TransientError, ours).retry_after_s)
                if attempt == _ATTEMPTS or not _is_worth_a_wait(ours):
                    raise ours from error
                if failure.status != 429:
                    asked_s = failure.retry_after_s or 0.0
                    self._sleep(
                        asked_s + self._rng.uniform(0, delay_s(attempt, 2 * _BACKOFF_S, _LONGEST_BACKOFF_S))
                    )
        raise AssertionError("the last attempt returns or raises")

    def find(self, what: Callable[[], T]) -> T | None:
        """Return the same, for something that may not be there."""
        try:
            return self.call(what)
        except ProvisionError as error:
            if isinstance(error.__cause__, ResourceNotFoundError) and error.code in _ABSENT:
                return None
            raise

    def vm(self, group: str, name: str) -> VirtualMachine | None:
        """With its instance view. Unlike the lists, this is never late."""
        return self.find(lambda: self.compute.virtual_machines.get(group, name, expand="instanceView"))

    def delete_vm(self, group: str, name: str) -> None:
        """Return when Azure has promised it. Not gently: processes were stopped before."""
        delete = self.compute.virtual_machines.begin_delete
        self.find(lambda: delete(group, name, force_deletion=True, polling=False).result())

    def all_in(self, listing: Callable[[str], Iterable[T]], group: str) -> list[T]:
        """Return all pages of a group's list; none of a group that is gone."""
        return self.find(lambda: list(listing(group))) or []

    def get(self, path: str, api_version: str) -> dict[str, Any]:
        """GET of what the SDK has no method for. `path` is below the subscription."""
        request = HttpRequest(
            "GET", f"/subscriptions/{self.subscription_id}{path}", params={"api-version": api_version}
        )
        return self.call(lambda: _json(self.resources.send_request(request)))

    def get_public(self, url: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
        """GET a public resource, without credentials."""
        request = HttpRequest("GET", url, params=dict(params or {}))
        return self.call(lambda: _json(self._public.send_request(request)))

    def _await_turn(self) -> None:
        with self._lock:
            wait_s = self._closed_until - self._now()
        if wait_s > 0:
            self._sleep(min(wait_s, _PATIENCE_S))

    def _hold_back(self, seconds: float) -> None:
        """Let no thread call for so long, and not all at the same instant after it."""
        with self._lock:
            spread_s = self._rng.uniform(0, _BACKOFF_S)
            self._closed_until = max(self._closed_until, self._now() + min(seconds, _PATIENCE_S) + spread_s)


def _is_worth_a_wait(error: ProvisionError) -> bool:
    return isinstance(error, TransientError) and error.retry_after_s <= _PATIENCE_S


def _json(response: HttpResponse) -> dict[str, Any]:
    response.raise_for_status()
    return cast(dict[str, Any], response.json())


def _failure_of(error: AzureError) -> AzureFailure:
    """Return the text of the SDK's exception. Its class does not: it makes a ResourceExistsError of every 409."""
    if isinstance(error, HttpResponseError) and error.response is not None:
        body = error.error
        code = (getattr(body, "code", None) if body is not None else None) or ""
        message = (getattr(body, "message", None) if body is not None else None) or error.reason or ""
        headers: Mapping[str, str] = getattr(error.response, "headers", None) or {}
        request_id = headers.get("x-ms-request-id", "")
        return AzureFailure(code, error.status_code, message, _retry_after_s(error), request_id)
    if isinstance(error, ClientAuthenticationError):
        return AzureFailure("CredentialUnavailable", None, error.message)
    return AzureFailure("Unreachable", None, error.message)


def _retry_after_s(error: HttpResponseError) -> float | None:
    headers: Mapping[str, str] = getattr(error.response, "headers", None) or {}
    text = headers.get("Retry-After") or headers.get("retry-after")
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:  # a date, which Azure does not send
        return None
