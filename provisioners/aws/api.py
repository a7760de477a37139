"""boto3 as the rest of the AWS modules use it: `call` an action by its name in a region.

Every call is paced by a token bucket of its region and class, has time-outs, and is repeated on throttling, AWS's own
trouble and lost responses, with full jitter (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog 2015)
and a bound. What leaves is one of the classes of `errors`.

The SDK's own retries are off: botocore repeats InsufficientInstanceCapacity, which EC2 sends with HTTP 500, and so hides
for seconds that another zone should be tried. Repeating is safe here because every request that changes something is
idempotent: by its client token (RunInstances), by the name of what it makes (groups, keys), or by nature (terminate).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from random import Random
from threading import Lock, RLock
from typing import Any, TypeVar

import boto3
from botocore import xform_name
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    LoginError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)
from botocore.exceptions import ConnectionError as SdkConnectionError
from botocore.parsers import ResponseParserError

from policies.backoff import delay_s
from policies.model import FailureKind
from provisioners.aws.errors import THROTTLES, AwsResponse, ErrorContext, closed, error_of, meaning_of
from provisioners.cloud_clock import CloudClock
from provisioners.port.errors import ProvisionError, RegionClosedError, TransientError
from provisioners.port.regions import ClosedRegions, SilentRegions
from provisioners.port.vm import Silent
from provisioners.rate_limit import Rate, RateLimiter

Reply = Mapping[str, Any]
T = TypeVar("T")

_NOT_ACCEPTED = ("AuthFailure", "InvalidClientTokenId", "UnrecognizedClientException")
_STS_S = 60.0  # for which STS's word stands

_PARALLEL_REGIONS = 8
_ATTEMPTS = 6
_BACKOFF_S = 1.0
_BACKOFF_MAX_S = 20.0
_PAGE = 500  # the most that every list of EC2 takes
_CONFIG = Config(
    retries={"mode": "standard", "total_max_attempts": 1},
    connect_timeout=5,
    read_timeout=30,
    max_pool_connections=16,
    user_agent_extra="skyserve",
)
_NO_CREDENTIALS = (
    CredentialRetrievalError,
    LoginError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)
_SDK_ERRORS = (ClientError, BotoCoreError, ResponseParserError)


def _group(action: str) -> tuple[str, Rate]:
    """Return what an action is counted with, and how often that may be called, by account and region.

    Source: "Request throttling for the Amazon EC2 API". EC2 counts most actions one by one, so this is on the safe side.
    """
    if action == "RunInstances":
        return "launch", Rate(
            burst=4, per_s=1.8
        )  # of 5 and 2: calls that keep their distance may still arrive together
    if action.startswith(("Describe", "Get")):
        return "read", Rate(burst=50, per_s=10)
    return "write", Rate(burst=50, per_s=5)


class RegionMemo:
    """What was found or made in each region, so that a launch costs one call and not five.

    Thread-safe: an unknown value is looked for once, however many threads need it. A failure is not remembered.
    """

    def __init__(self) -> None:
        self._regions: dict[str, tuple[RLock, dict[tuple[str, ...], Any]]] = {}

    def get(self, region: str, key: tuple[str, ...], find: Callable[[], Any]) -> Any:
        lock, known = self._regions.setdefault(region, (RLock(), {}))
        with lock:
            if key not in known:
                known[key] = find()
            return known[key]

    def drop(self, region: str) -> None:
        """Something of the region was deleted behind our back."""
        lock, known = self._regions.setdefault(region, (RLock(), {}))
        with lock:
            known.clear()


class AwsApi:
    """Thread-safe. `session` is for those who have one already; reading boto3's models again takes a while."""

    def __init__(
        self,
        profile: str | None,
        now: Callable[[], float],
        sleep: Callable[[float], None],
        rng: Random,
        session: boto3.Session | None = None,
    ) -> None:
        self.now = now
        self._profile = profile
        self._sleep = sleep
        self._rng = rng
        self._session = session
        self._clients: dict[tuple[str, str], Any] = {}
        self._pacer = RateLimiter(now, sleep)
        self.clock = CloudClock(now)
        self._lock = Lock()
        self._sts_lock = Lock()
        self._sts_at: float | None = None
        self._sts_accepts = False

    @property
    def home_region(self) -> str:
        """Where questions about the account itself go."""
        try:
            return str(self._opened().region_name or "us-east-1")
        except BotoCoreError as error:
            raise error_of(
                _response_of(error), ErrorContext("credentials", "no region"), self.now()
            ) from error

    def call(
        self,
        region: str,
        action: str,
        params: Mapping[str, Any] | None = None,
        *,
        service: str = "ec2",
        asked: ErrorContext | None = None,
        unless: Collection[str] = (),
        wait_for: Collection[str] = (),
        patience_s: float = 60.0,
        attempts: int = _ATTEMPTS,
    ) -> Reply | None:
        """Return the response of AWS to `action`, or None if it is one of the codes `unless`.

        The codes `wait_for` are those that pass by themselves (something made a moment ago is not known everywhere
        yet): they are waited for until `patience_s` seconds are over, and only then count. `asked` makes for better sentences.
        """
        asked = asked or ErrorContext(f"{_IAM.get(service, service)}:{action}", region)
        started = self.now()
        failures = 0
        while True:
            self._pace(region, action)
            try:
                reply: Reply = getattr(self._client(service, region), xform_name(action))(**(params or {}))
                self.clock.set_from_header(
                    reply.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
                )
                return reply
            except _SDK_ERRORS as error:
                refusal = _response_of(error)
                failures += 1
                is_waited_for = refusal.code in wait_for and self.now() - started < patience_s
                if not is_waited_for:
                    if refusal.code in unless:
                        return None
                    kind = meaning_of(refusal, asked.capacity_type).kind
                    if refusal.code in _NOT_ACCEPTED and service == "ec2" and self._accepted_elsewhere():
                        raise closed(refusal, asked, self.now()) from error
                    if kind is not FailureKind.TRANSIENT or failures >= attempts:
                        raise error_of(refusal, asked, self.now()) from error
            if refusal.code in THROTTLES:
                self._pacer.drain((region, _group(action)[0]))
            self._sleep(self._jitter(failures))

    def request(self, region: str, action: str, params: Mapping[str, Any] | None = None, **how: Any) -> Reply:
        """`call` where no code stands for None."""
        reply = self.call(region, action, params, **how)
        return {} if reply is None else reply

    def pages(
        self, region: str, action: str, items: str, params: Mapping[str, Any], page: int = _PAGE, **how: Any
    ) -> Iterator[Any]:
        """Yield the items of a list, all pages of it; a page that cannot be read is an error, never the end."""
        token: Mapping[str, str] = {}
        while True:
            reply = self.request(region, action, {**params, "MaxResults": page, **token}, **how)
            yield from reply.get(items, ())
            if not reply.get("NextToken"):
                return
            token = {"NextToken": reply["NextToken"]}

    def dry_run(self, region: str, action: str, params: Mapping[str, Any]) -> AwsResponse:
        """EC2's response to whether the call would be allowed. It changes nothing."""
        self._pace(region, action)
        try:
            getattr(self._client("ec2", region), xform_name(action))(DryRun=True, **params)
        except _SDK_ERRORS as error:
            return _response_of(error)
        return AwsResponse("DryRunOperation", 200, "")  # EC2 never says so, but it would mean yes

    def _accepted_elsewhere(self) -> bool:
        """Return whether STS accepts the credentials that a region of EC2 does not.

        EC2 says the same of a region that the account has not enabled.
        """
        with self._sts_lock:  # many regions may call at once
            if self._sts_at is None or self.now() - self._sts_at > _STS_S:
                try:
                    self._client("sts", self.home_region).get_caller_identity()
                    self._sts_accepts = True
                except _SDK_ERRORS:
                    self._sts_accepts = False
                self._sts_at = self.now()
            return self._sts_accepts

    def wait(self, failures: int) -> None:
        """A moment that is longer the more often something has failed."""
        self._sleep(self._jitter(failures))

    def _jitter(self, failures: int) -> float:
        return self._rng.uniform(0.0, delay_s(failures + 1, _BACKOFF_S, _BACKOFF_MAX_S))

    def _pace(self, region: str, action: str) -> None:
        group, rate = _group(action)
        self._pacer.take_turn((region, group), rate)

    def _client(self, service: str, region: str) -> Any:
        with self._lock:  # making clients is the part of boto3 that is not thread-safe
            known = self._clients.get((service, region))
            if known is None:
                known = self._opened().client(service, region_name=region, config=_CONFIG)  # type: ignore[call-overload]
                self._clients[service, region] = known
            return known

    def _opened(self) -> boto3.Session:
        if self._session is None:
            self._session = boto3.Session(profile_name=self._profile)
        return self._session


_IAM = {"service-quotas": "servicequotas"}


def _response_of(error: Exception) -> AwsResponse:
    """Return the SDK's exception as the response of AWS, or as none."""
    if isinstance(error, ClientError):
        body = error.response.get("Error", {})
        about: Mapping[str, Any] = error.response.get("ResponseMetadata", {})
        status, request_id = int(about.get("HTTPStatusCode", 0)), str(about.get("RequestId", ""))
        return AwsResponse(str(body.get("Code", "")), status, str(body.get("Message", "")), request_id)
    if isinstance(error, _NO_CREDENTIALS):
        return AwsResponse("NoCredentials", 401, str(error))
    lost = isinstance(error, HTTPClientError | SdkConnectionError | ResponseParserError)
    return AwsResponse(type(error).__name__, 0 if lost else 400, str(error))


class EveryRegion:
    """One question to many regions, side by side, and the state of regions that are closed or silent. Thread-safe."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.closed = ClosedRegions(now)
        self._unlistable = ClosedRegions(now)  # of them, those that cannot be listed either
        self._silent = SilentRegions(now)

    def is_suspect(self, region: str) -> bool:
        """Return whether the region did not respond a moment ago."""
        return self._silent.is_suspect(region)

    def call(
        self,
        regions: Sequence[str],
        ask: Callable[[str], Sequence[T]],
        silent: Silent | None = None,
        *,
        is_listing: bool = False,
    ) -> Iterator[T]:
        """Return the responses of all regions but the closed ones.

        The first that has none raises, unless `silent` is given; if no region responds the first error is raised all the
        same. Of a listing of machines (`is_listing`) it is remembered which regions are closed or silent, and `silent`
        gets both.
        """

        def response(region: str) -> Sequence[T] | ProvisionError:
            known: ProvisionError | None = self._unlistable.find(region)
            if known is None and is_listing and silent is not None:
                known = self._silent.waits(region)
            if known is not None:
                return known
            try:
                found = ask(region)
            except ProvisionError as error:
                if is_listing and isinstance(error, RegionClosedError):
                    self.closed.note(error)
                    self._unlistable.note(error)
                elif silent is None:
                    raise
                elif is_listing and isinstance(error, TransientError):
                    self._silent.note(region, error)  # others come at once, and may be over at any moment
                return error
            if is_listing:
                self._silent.responded(region)
            return found

        with ThreadPoolExecutor(max_workers=_PARALLEL_REGIONS, thread_name_prefix="aws") as pool:
            responses = list(zip(regions, pool.map(response, regions), strict=True))
        errors = [(region, one) for region, one in responses if isinstance(one, ProvisionError)]
        if errors and len(errors) == len(responses):
            for region in regions:  # it is our network, or the whole cloud: call all of them again
                self._silent.responded(region)
            raise errors[0][1]
        for region, error in errors:
            if silent is not None and (is_listing or not isinstance(error, RegionClosedError)):
                silent(region, error)
        return chain.from_iterable(one for _, one in responses if not isinstance(one, ProvisionError))
