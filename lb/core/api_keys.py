"""Who may call, and how much: API keys and their limits. Pure; `now` is an argument.

A key arrives as `Authorization: Bearer KEY` and is known here by its SHA-256 only, so a table, a dump or a log
holds nothing that opens a door. It is found by looking its digest up in a dict. That lookup need not take
constant time: an attacker who measures it learns about digests of his own guesses, and to steer a digest towards
a known one he would have to find preimages of SHA-256. Keys are long and random, so no salt and no slow hash.

With keys configured the `Authorization` header belongs to the load balancer: it is consumed, and targets do not
get it. Without keys everybody is the anonymous tenant, nothing is limited, and the header is passed on.

Limits are token buckets. A bucket holds one minute's worth and fills evenly: who was idle may send a minute's
worth at once (as people read "60 per minute"), and over any t minutes nobody gets more than 1 + t minutes'
worth. A request takes one from the bucket of requests when it is let in. What it costs in model tokens is known
only when it is over, so it is let in while that bucket is above zero and charged afterwards, below zero if need
be; the debt is paid by waiting. Several keys of one name are one tenant (an old key and its successor): they
share the buckets, and the limits are those of the one listed last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

from lb.config.options import Access, ApiKey

ANONYMOUS = ""


class Admitted(NamedTuple):
    """The request may come in, as one of `tenant`; `weight` is the tenant's share of a full queue."""

    tenant: str
    weight: float


class Unauthorized(NamedTuple):
    """No key, or none that is known: 401."""

    given: bool  # there was an Authorization header, though a wrong one


class Limited(NamedTuple):
    """The tenant has used up what it may have: 429. `what` is "requests" or "tokens", of which it may have
    `per_minute`; after `retry_after_s` one more request would be let in if no other came."""

    tenant: str
    what: str
    per_minute: float
    retry_after_s: float


class Usage(NamedTuple):
    """A tenant's account since the start of the agent. What is left of a bucket is None if there is no limit."""

    tenant: str
    admitted: int
    limited: int
    tokens: int
    requests_left: float | None
    tokens_left: float | None


class _Bucket:
    """Holds at most one minute's worth; a rate of 0 is no limit."""

    __slots__ = ("at", "level", "per_minute")

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self.level = self._size()
        self.at = now

    def _size(self) -> float:
        return max(1.0, self.per_minute)  # one request must fit, or none would ever be let in

    def fill(self, now: float) -> float:
        """The level now."""
        if now > self.at:
            self.level = min(self._size(), self.level + (now - self.at) * self.per_minute / 60.0)
            self.at = now
        return self.level

    def change(self, per_minute: float, now: float) -> None:
        """A new limit keeps what is there, debts too; one where none was starts full."""
        if not self.per_minute:
            self.per_minute = per_minute
            self.level, self.at = self._size(), now
            return
        self.fill(now)
        self.per_minute = per_minute
        self.level = min(self.level, self._size())

    def wait_s(self, wanted: float) -> float:
        """How long until the level is `wanted`."""
        return max(0.0, wanted - self.level) * 60.0 / self.per_minute


class _Tenant:
    __slots__ = ("admitted", "limited", "pass_", "requests", "tokens", "used")

    def __init__(self, key: ApiKey, now: float) -> None:
        self.pass_ = Admitted(key.name, key.weight)
        self.requests = _Bucket(key.requests_per_minute, now)
        self.tokens = _Bucket(key.tokens_per_minute, now)
        self.admitted = 0
        self.limited = 0
        self.used = 0


_SOME_TOKENS = 1.0  # the bucket of tokens must be this full for a request to be let in
_NOBODY_S = Admitted(ANONYMOUS, 1.0)
_NO_KEY = Unauthorized(False)
_WRONG_KEY = Unauthorized(True)


class ApiKeyStore:
    """The keys in force and what their owners have used."""

    def __init__(self, access: Access, now: float) -> None:
        self._by_digest: dict[bytes, _Tenant] = {}
        self._by_name: dict[str, _Tenant] = {}
        self.apply(access, now)

    @property
    def guards(self) -> bool:
        """Whether keys are needed; then `Authorization` is not passed on to targets."""
        return bool(self._by_digest)

    def apply(self, access: Access, now: float) -> None:
        """Other keys are in force. Tenants that stay keep the levels of their buckets."""
        by_digest: dict[bytes, _Tenant] = {}
        by_name: dict[str, _Tenant] = {}
        for key in access.keys:
            tenant = self._by_name.get(key.name) or by_name.get(key.name) or _Tenant(key, now)
            tenant.pass_ = Admitted(key.name, key.weight)
            by_name[key.name] = by_digest[bytes.fromhex(key.sha256)] = tenant
        for key in {key.name: key for key in access.keys}.values():
            by_name[key.name].requests.change(key.requests_per_minute, now)
            by_name[key.name].tokens.change(key.tokens_per_minute, now)
        self._by_digest, self._by_name = by_digest, by_name

    def admit(self, authorization: bytes | None, now: float) -> Admitted | Unauthorized | Limited:
        """What becomes of a request with this `Authorization` header (None: it has none)."""
        if not self._by_digest:
            return _NOBODY_S
        if authorization is None:
            return _NO_KEY
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            return _WRONG_KEY
        tenant = self._by_digest.get(hashlib.sha256(key.strip()).digest())
        if tenant is None:
            return _WRONG_KEY
        requests, tokens = tenant.requests, tenant.tokens
        if requests.per_minute and requests.fill(now) < 1.0:
            return self._limited(tenant, "requests", requests, 1.0)
        if tokens.per_minute and tokens.fill(now) < _SOME_TOKENS:
            return self._limited(tenant, "tokens", tokens, _SOME_TOKENS)
        if requests.per_minute:
            requests.level -= 1.0
        tenant.admitted += 1
        return tenant.pass_

    def charge(self, tenant: str, tokens: int, now: float) -> None:
        """A request of the tenant has cost so many tokens, of its prompt and of its answer. A tenant that is no
        longer known owes nothing."""
        account = self._by_name.get(tenant)
        if account is None:
            return
        account.used += tokens
        if account.tokens.per_minute:
            account.tokens.fill(now)
            account.tokens.level -= tokens

    def usage(self, now: float) -> Iterator[Usage]:
        """Every tenant's account."""
        for name, tenant in self._by_name.items():
            left = [
                bucket.fill(now) if bucket.per_minute else None for bucket in (tenant.requests, tenant.tokens)
            ]
            yield Usage(name, tenant.admitted, tenant.limited, tenant.used, *left)

    @staticmethod
    def _limited(tenant: _Tenant, what: str, bucket: _Bucket, wanted: float) -> Limited:
        tenant.limited += 1
        return Limited(tenant.pass_.tenant, what, bucket.per_minute, bucket.wait_s(wanted))
