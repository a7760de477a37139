"""Compute Engine's REST API through Google's SDK: every call bounded in time, tried once, its errors ours.

The SDK's own retries are off: they hide stock-outs and outlast our deadlines (ten minutes by default). Its
`ExtendedOperation` is not used either, because `result()` calls the public endpoint even if another one was given to the client
made for; the `*_unary` methods give the operation itself, which we wait for here.

Calls are paced by the groups in which Google counts them ("Compute Engine rate quotas": by project and minute, 1,500 of
most groups), and a refusal for their number empties the group's bucket.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import google.auth
import requests
from google.api_core.exceptions import GoogleAPICallError, from_http_response
from google.auth import exceptions as auth_exceptions
from google.auth.credentials import AnonymousCredentials, Credentials
from google.auth.transport.requests import AuthorizedSession
from google.cloud import compute_v1

from policies.model import CapacityType, Zone
from provisioners.clock import unix_now
from provisioners.cloud_clock import CloudClock
from provisioners.gcp.errors import CLOUD, RETRY_S, error_of
from provisioners.port.errors import AuthError, ProvisionError, TransientError
from provisioners.port.vm import Silent
from provisioners.rate_limit import Rate, RateLimiter

CALL_TIMEOUT_S = 30.0
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_DONE = compute_v1.Operation.Status.DONE
_SILENT = frozenset({"", "NO_RESULTS_ON_PAGE"})  # warnings of a listing that lacks nothing

# Well below 25 a second: others use the project, too, and its window may begin at any time.
_USUAL = Rate(burst=30, per_s=15)
_RATES: Mapping[str, Rate] = MappingProxyType(
    {"read": _USUAL, "list": Rate(burst=20, per_s=10), "wait": _USUAL, "write": _USUAL}
)

T = TypeVar("T")


class _Pager(Protocol):
    @property
    def pages(self) -> Iterator[Any]: ...


class GcpApi:
    """The clients of one project. Thread-safe; credentials are looked for at the first call.

    Without `credentials` the application default ones are used. `endpoint` stands in for all of Google's hosts; over
    plain http the default credentials are not sent.
    """

    def __init__(
        self,
        project: str | None,
        credentials: Credentials | None,
        endpoint: str | None,
        *,
        now: Callable[[], float] = unix_now,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._project = project
        self._credentials = credentials
        self._endpoint = endpoint
        self._lock = threading.RLock()
        self._clients: dict[type[Any], Any] = {}
        self.now = now
        self._sleep = sleep
        self._pacer = RateLimiter(now, sleep)
        self.clock = CloudClock(now)

    @property
    def project(self) -> str:
        """The project's id; AuthError if none is configured."""
        return self._identity[1]

    def client(self, kind: Callable[..., T]) -> T:
        """Return the one client of this kind, for our endpoint."""
        credentials = self._identity[0]
        with self._lock:
            found = self._clients.get(kind)  # type: ignore[call-overload]
            if found is None:
                options = {"api_endpoint": self._endpoint} if self._endpoint else {}
                found = kind(credentials=credentials, client_options=options)
                self._listen(found)
                self._clients[kind] = found  # type: ignore[index]
            return found  # type: ignore[no-any-return]

    def _listen(self, client: Any) -> None:
        """Take the time from all responses to the client. The SDK has no public hook; without this one there is no offset."""
        session = getattr(getattr(client, "transport", None), "_session", None)
        if session is not None:
            session.hooks["response"].append(
                lambda response, *_, **__: self.clock.set_from_header(response.headers.get("Date"))
            )

    def call(
        self,
        method: Callable[..., T],
        request: object,
        *,
        zone: Zone | None = None,
        capacity_type: CapacityType = CapacityType.ON_DEMAND,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> T:
        """Return one call. Raises the classes of `provisioners.port.errors`, with the reason as `code`."""
        with self._ours(zone, capacity_type, group_of(request)):
            return method(request, retry=None, timeout=timeout_s)

    def find(
        self, method: Callable[..., T], request: object, name: str, *, zone: Zone | None = None
    ) -> T | None:
        """Return one call about something by that name; None if there is no such thing."""
        try:
            return self.call(method, request, zone=zone)
        except ProvisionError as error:
            # Only its own absence counts: a project or zone that is not found is no evidence about its content.
            if error.code == "notFound" and re.search(rf"/{re.escape(name)}'", error.message):
                return None
            raise

    def listed(
        self,
        method: Callable[..., _Pager],
        request: object,
        *,
        zone: Zone | None = None,
        silent: Silent | None = None,
    ) -> list[Any]:
        """Return the items of all pages: of a plain list themselves, of an aggregated one (scope, items).

        Never a part of them: a scope that could not be reached is a TransientError, unless `silent` is given.
        """
        found: list[Any] = []
        group = group_of(request)
        with self._ours(zone, CapacityType.ON_DEMAND, group):
            for number, page in enumerate(method(request, retry=None, timeout=CALL_TIMEOUT_S).pages):
                found.extend(page.items.items() if isinstance(page.items, Mapping) else page.items)
                _refuse_partial(page, silent)
                if number > 0:  # the first had its turn
                    self._pacer.take_turn(group, _RATES[group])
        return found

    def wait(
        self,
        operation: compute_v1.Operation,
        timeout_s: float,
        zone: Zone | None = None,
        project: str | None = None,
    ) -> compute_v1.Operation:
        """The operation when it is done, or as it is at the end of that time.

        `zone` is None for a global one; `project` is another one than ours.
        """
        deadline = self.now() + timeout_s
        project = project or self.project
        while operation.status != _DONE and (left_s := deadline - self.now()) > 0:
            method: Callable[..., compute_v1.Operation]
            request: object
            if zone is None:
                method = self.client(compute_v1.GlobalOperationsClient).wait
                request = compute_v1.WaitGlobalOperationRequest(project=project, operation=operation.name)
            else:
                method = self.client(compute_v1.ZoneOperationsClient).wait
                request = compute_v1.WaitZoneOperationRequest(
                    project=project, zone=zone.name, operation=operation.name
                )
            try:
                operation = self.call(method, request, zone=zone, timeout_s=min(left_s, CALL_TIMEOUT_S))
            except TransientError as error:
                self._sleep(min(error.retry_after_s, left_s))
        return operation

    def rest(self, method: str, host: str, path: str, **arguments: Any) -> Any:
        """Return the JSON response of a Google API that has no client in the SDK we use."""
        session = self._session
        base = self._endpoint or f"https://{host}"
        with self._ours(None, CapacityType.ON_DEMAND, "read"):
            url = f"{base}/{path}"
            response = session.request(method, url, timeout=CALL_TIMEOUT_S, **arguments)  # type: ignore[no-untyped-call]
            if response.status_code >= 400:
                raise from_http_response(response)  # type: ignore[no-untyped-call]
            return response.json()

    @cached_property
    def _session(self) -> AuthorizedSession:
        return AuthorizedSession(self._identity[0])  # type: ignore[no-untyped-call]

    @property
    def _identity(self) -> tuple[Credentials, str]:
        with self._lock:
            credentials, project = self._credentials, self._project
            if credentials is None and self._endpoint is not None and self._endpoint.startswith("http://"):
                credentials = AnonymousCredentials()  # type: ignore[no-untyped-call]
            if credentials is None:
                with self._ours(None, CapacityType.ON_DEMAND, None):
                    credentials, default = google.auth.default(scopes=[_SCOPE])
                project = project or default
            if not project:
                raise AuthError(
                    "no Google Cloud project is named: set it in config.yaml, or `gcloud config set project`",
                    cloud=CLOUD,
                )
            self._credentials, self._project = credentials, project
            return credentials, project

    @contextmanager
    def _ours(self, zone: Zone | None, capacity_type: CapacityType, group: str | None) -> Iterator[None]:
        """Wait for the group's turn; errors are translated into ours."""
        if group is not None:
            self._pacer.take_turn(group, _RATES[group])
        try:
            yield
        except GoogleAPICallError as error:
            code, message = _error_text(error)
            if error.code == 429 or code.lower().endswith("ratelimitexceeded"):
                self._pacer.drain(group)
            raise error_of(
                code,
                int(error.code or 0),
                message,
                capacity_type=capacity_type,
                zone=zone,
                now=self.now(),
                retry_after_s=_retry_after_s(error),
            ) from error
        except (requests.RequestException, auth_exceptions.TransportError) as error:
            raise TransientError(
                f"Compute Engine cannot be reached: {error}", cloud=CLOUD, zone=zone, retry_after_s=RETRY_S
            ) from error
        except auth_exceptions.GoogleAuthError as error:
            raise AuthError(
                f"there are no valid Google Cloud credentials: run `gcloud auth application-default login` ({error})",
                cloud=CLOUD,
                zone=zone,
            ) from error


def failure_of(
    operation: compute_v1.Operation, zone: Zone | None, capacity_type: CapacityType, now: float
) -> ProvisionError:
    """Return what to raise for an operation that was accepted and failed."""
    first = operation.error.errors[0]
    return error_of(
        first.code,
        operation.http_error_status_code,
        first.message,
        capacity_type=capacity_type,
        zone=zone,
        now=now,
        operation=operation.name,
    )


def group_of(request: object) -> str:
    """Return what a request is counted with, by the name of its type: GetInstanceRequest, ListZoneOperationsRequest, …."""
    name = type(request).__name__
    if name.startswith("Get"):
        return "read"
    if name.startswith(("List", "AggregatedList")):
        return "list"
    return "wait" if name.startswith("Wait") else "write"


def _error_text(error: GoogleAPICallError) -> tuple[str, str]:
    """Return the reason, and Google's own words without the SDK's decoration."""
    for entry in error.errors:
        if isinstance(entry, Mapping) and entry.get("reason"):
            return str(entry["reason"]), str(entry.get("message", error.message))
    return str(error.reason or ""), str(error.message)


def _retry_after_s(error: GoogleAPICallError) -> float | None:
    headers = getattr(error.response, "headers", None) or {}
    given = str(headers.get("Retry-After", ""))
    return float(given) if given.isdecimal() else None


def _refuse_partial(page: Any, silent: Silent | None) -> None:
    """Raise, or report, unless the page is all that it should be."""
    scopes = page.items if isinstance(page.items, Mapping) else {}
    warnings = [(scope, held.warning) for scope, held in scopes.items() if held.warning.code not in _SILENT]
    if page.warning.code not in _SILENT:
        warnings.append(("", page.warning))
    missing = [*getattr(page, "unreachables", ()), *(scope or warning.code for scope, warning in warnings)]
    if not missing:
        return
    said = warnings[0][1].message if warnings else "unreachable"
    scopes_missing = ", ".join(sorted(set(missing)))
    error = TransientError(
        f"Compute Engine cannot list {scopes_missing} now: {said}", cloud=CLOUD, code="UNREACHABLE"
    )
    # What names no zone or region may be any of them.
    if silent is None or not all(re.fullmatch(r"(zones|regions)/[\w-]+", scope) for scope in missing):
        raise error
    for scope in sorted(set(missing)):
        silent(scope.rpartition("/")[2], error)
