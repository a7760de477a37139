"""Who may call, and how much: API keys and their limits. Pure; `now` is an argument.

A key arrives as `Authorization: Bearer KEY`, `x-api-key: KEY`, `api-key: KEY`, as the password of HTTP Basic (or its user name, if
the password is empty), as a subprotocol of a WebSocket or in the query (`lb.http.key_carriers`). It is known here by its SHA-256 only,
so a table, a dump or a log holds nothing that opens an endpoint. It is found by looking its digest up in a dict. That
lookup need not take constant time: an attacker who measures it learns about digests of his own guesses, and to steer a
digest towards a known one he would have to find preimages of SHA-256. Keys are long and random, so no salt and no slow
hash.

With keys configured, each place that carried a known key (`Admission.carried_by`) belongs to the load balancer: targets
do not get it. Without keys every client is the anonymous tenant, nothing is limited, and all headers are passed on.

**The account of a request** is opened by `admit_head`, on the head alone; `reserve` follows when its body is known, and
`settle` exactly once when it is over, in any way. Requests that are refused after `admit_head` (by `reserve`, by
a full queue, for a bad body) are settled with 0 tokens.

Limits of requests and tokens are token buckets. A bucket holds one minute's worth and fills evenly: a tenant that was
idle may send a minute's worth at once (as people read "60 per minute"), and over any t minutes it gets no more than 1 + t
minutes' worth. A request takes 1 from the bucket of requests. From the bucket of tokens it takes its prompt and the tokens
it is expected to generate, which is `max_tokens`, or what nine of ten of the tenant's responses have had lately if that is
less (see `lb.core.tenant.PastResponses`); `settle` replaces this reservation by what was used. A request is let in while the
bucket holds at least one token, and may take it below zero; the debt is paid by waiting. So a request that is larger than a
whole bucket passes when its turn comes, and n requests in parallel get the limit plus one request, not n times as much.
Tokens used beyond the expectation are charged in full, afterwards.

`max_concurrent` bounds the requests between `admit_head` and `settle`, held ones included.

Several keys of one name are one tenant (an old key and its successor): they share the buckets, and the limits are those
of the one listed last. The numbers are kept in a `LimitStore`, which several processes may share; agents of other regions
have buckets of their own, and charge each other what they let in (`lb.core.shared_quota`).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lb.config.options import Access, ApiKey
from lb.core.hop import RequestHop
from lb.core.limit_store import LimitStore, MemoryLimits
from lb.core.residency import ANYWHERE
from lb.core.shared_quota import Charge, SharedQuota
from lb.core.tenant import ONE, Allowance, Limited, Tenant

__all__ = [
    "ANONYMOUS",
    "Admission",
    "AlreadySettledError",
    "ApiKeyStore",
    "Limited",
    "Unauthorized",
    "Usage",
]

ANONYMOUS = ""
MOST_SHOWN = 1000


class AlreadySettledError(Exception):
    """A request's account was used after it had been settled."""


class Unauthorized(NamedTuple):
    """No key, or none that is known: 401."""

    given: bool  # there was a header for a key, though with a wrong one


class Usage(NamedTuple):
    """A tenant's account.

    `admitted`, `limited` and `tokens` are this process's since its start; the rest of the buckets (None without a
    limit), reservations and requests in flight are those of all that share the limits.
    """

    tenant: str
    admitted: int
    limited: int
    tokens: int
    requests_left: float | None
    tokens_left: float | None
    reserved: int
    in_flight: int


class Admission:
    """A request that was let in, from `admit_head` to `settle`.

    Its place among the tenant's requests under way; the tokens of its prompt, as estimated, those it has reserved, and those
    it was charged. `carried_by` names the headers, in lower case, and other places (`lb.http.key_carriers`) whose keys must not reach
    a target. `hop` is that of a request which was let in, and is charged, by an agent of another region.
    `zones` are those of the key's residency (see `lb.core.residency`).
    """

    __slots__ = (
        "_account",
        "_settled",
        "carried_by",
        "charged",
        "hop",
        "most_out",
        "prompt_tokens",
        "reserved",
        "tenant",
        "text_bytes",
        "weight",
        "zones",
    )

    def __init__(self, account: Tenant | None, carried_by: tuple[bytes, ...]) -> None:
        self.tenant = ANONYMOUS if account is None else account.key.name
        self.weight = 1.0 if account is None else account.key.weight
        self.zones = ANYWHERE if account is None else account.zones
        self.carried_by = carried_by
        self.hop: RequestHop | None = None
        self.text_bytes = 0  # of a prompt that is nothing but text
        self.prompt_tokens = 0
        self.most_out: int | None = 0  # the client's limit on generated tokens, over all choices; None: none
        self.reserved = 0
        self.charged = 0
        self._account = account
        self._settled = False

    @staticmethod
    def of_peer(hop: RequestHop) -> Admission:
        """Return the admission of a request that a peer forwards."""
        admission = Admission(None, ())
        admission.hop, admission.tenant, admission.weight = hop, hop.tenant, hop.weight
        admission.zones = hop.zones
        return admission

    @property
    def settled(self) -> bool:
        return self._settled

    @property
    def counts_tokens(self) -> bool:
        """Whether its key has a limit of tokens."""
        return self._account is not None and self._account.key.tokens_per_minute > 0

    def allowances(self) -> tuple[Allowance, ...]:
        """Return what is left of the limits per minute of its key, reservations taken off."""
        return () if self._account is None else self._account.allowances()

    def may_use(self, path: bytes) -> bool:
        """Return whether the key may use a path whose work nothing counts."""
        account = self._account
        return account is None or any(
            path.startswith(allowed[:-1].encode()) if allowed.endswith("*") else path == allowed.encode()
            for allowed in account.key.paths
        )


_NO_KEY = Unauthorized(False)
_WRONG_KEY = Unauthorized(True)


class ApiKeyStore:
    """The keys in force and what their owners have used."""

    def __init__(
        self,
        access: Access,
        now: float,
        limits: LimitStore | None = None,
        quota: SharedQuota | None = None,
    ) -> None:
        """Keep the numbers in `limits`, None: in this process alone; `quota` is shared with agents of other regions."""
        self._limits = MemoryLimits() if limits is None else limits
        self.quota = quota
        self._guards = False
        self._by_digest: dict[bytes, ApiKey] = {}
        self._by_name: dict[str, ApiKey] = {}  # of several keys of one name, the one that is listed last
        self._tenants: dict[str, Tenant] = {}  # those that have sent a request
        self.apply(access, now)

    @property
    def guards(self) -> bool:
        """Whether keys are needed."""
        return self._guards

    def apply(self, access: Access, now: float) -> None:
        """Other keys are in force. Tenants that stay keep the levels of their buckets."""
        self._by_digest = {bytes.fromhex(key.sha256): key for key in access.keys}
        self._by_name = {key.name: key for key in access.keys}
        self._guards = bool(access.keys or access.keys_file)
        self._tenants = {name: tenant for name, tenant in self._tenants.items() if name in self._by_name}
        changed = [one for name, one in self._tenants.items() if one.key is not self._by_name[name]]
        if changed:
            self._limits.lock(now)
            try:
                for tenant in changed:
                    tenant.change(self._by_name[tenant.key.name], now)
            finally:
                self._limits.unlock()

    def _tenant(self, name: str, now: float) -> Tenant:
        """Return the owner of keys that are in force. One without requests costs no memory and no row of the limits."""
        tenant = self._tenants.get(name)
        if tenant is None:
            key = self._by_name[name]
            tenant = self._tenants[name] = Tenant(key, self._limits)
            self._limits.lock(now)
            try:
                tenant.change(key, now)
            finally:
                self._limits.unlock()
        return tenant

    # --- the account of one request

    def admit_head(
        self, credentials: Iterable[tuple[bytes, bytes]], now: float
    ) -> Admission | Unauthorized | Limited:
        """Return what becomes of a request with these headers for keys: (name in lower case, value), as they came.

        Checks the limits and takes one request. The first header that carries a known key decides whose it is.
        """
        if not self._guards:
            return Admission(None, ())
        owner: ApiKey | None = None
        given = False
        carried_by: tuple[bytes, ...] = ()
        for header, value in credentials:
            given = True
            found = self._by_digest.get(_digest(header, value))
            if found is not None:
                owner = owner or found
                carried_by += (header,)
        if owner is None:
            return _WRONG_KEY if given else _NO_KEY
        account = self._tenant(owner.name, now)
        refusal = self._enter(account, now)
        if refusal is not None and self._limits.reap(now):
            refusal = self._enter(account, now)
        if refusal is not None:
            account.limited += 1
            return refusal
        account.admitted += 1
        return Admission(account, carried_by)

    def reserve(
        self, admission: Admission, prompt_tokens: int, max_tokens: int | None, now: float, choices: int = 1
    ) -> Limited | None:
        """Take the tokens that the request is expected to use, at most once; None if it may go on.

        `max_tokens` is the client's limit on generated tokens, over all `choices`; None or below zero is no limit.
        A request that is refused here has taken no request from its bucket; it is still to be settled.
        """
        account = admission._account
        if admission._settled or admission.reserved:
            raise AlreadySettledError("a request reserves its tokens once, before it is settled")
        admission.prompt_tokens, admission.most_out = prompt_tokens, max_tokens
        if account is None or not account.key.tokens_per_minute:
            return None
        generated = account.past.expected * choices
        if max_tokens is not None and max_tokens >= 0:
            generated = min(generated, max_tokens)
        wanted = prompt_tokens + generated
        row = account.row
        self._limits.lock(now)
        try:
            self._fill(account, now)
            refusal = account.lacks_tokens(self._left(account)[1])
            if refusal is not None:
                row.requests += ONE
                account.admitted -= 1
                account.limited += 1
                self._take(account, -1, 0)
                return refusal
            row.tokens -= wanted
            row.own_reserved += wanted
        finally:
            self._limits.unlock()
        self._take(account, 0, wanted)
        admission.reserved = wanted
        return None

    def settle(self, admission: Admission, tokens: int, now: float, generated: int | None = None) -> None:
        """Charge a request that is over: `tokens` are those of its prompt and those generated.

        `generated` is how many tokens each choice of a response has that is whole; None: there is none to learn from.
        Raises AlreadySettledError the second time.
        """
        if admission._settled:
            raise AlreadySettledError(f"a request of {admission.tenant!r} has been settled before")
        admission._settled = True
        account = admission._account
        if account is None:
            return
        account.row.own_in_flight -= 1
        admission.charged = tokens
        if generated is not None:
            account.past.add(generated)
        self._charge(account, tokens, admission.reserved, now)

    def usage(self, now: float) -> Iterator[Usage]:
        """Yield every tenant's account; of more than MOST_SHOWN, those that have sent a request."""
        self._limits.reap(now)
        for name in list(self._by_name if len(self._by_name) <= MOST_SHOWN else self._tenants):
            tenant = self._tenant(name, now)
            row, key = tenant.row, tenant.key
            self._limits.lock(now)
            try:
                self._fill(tenant, now)
                requests, tokens = row.requests, row.tokens
            finally:
                self._limits.unlock()
            yield Usage(
                name,
                tenant.admitted,
                tenant.limited,
                tenant.used,
                requests if key.requests_per_minute else None,
                tokens if key.tokens_per_minute else None,
                row.reserved(),
                row.in_flight(),
            )

    def _enter(self, account: Tenant, now: float) -> Limited | None:
        """Take one request and a place among those under way, unless a limit is reached."""
        row = account.row
        if not account.is_limited:
            row.own_in_flight += 1
            return None
        self._limits.lock(now)
        try:
            self._fill(account, now)
            refusal = account.exceeded(*self._left(account))
            if refusal is None:
                row.requests -= ONE
                row.own_in_flight += 1
                self._take(account, 1, 0)
        finally:
            self._limits.unlock()
        return refusal

    def _charge(self, account: Tenant, tokens: int, reserved: int, now: float) -> None:
        account.used += tokens
        if not reserved and not (tokens and account.key.tokens_per_minute):
            return
        row = account.row
        self._limits.lock(now)
        try:
            self._fill(account, now)
            row.tokens += reserved - tokens
            row.own_reserved -= reserved
        finally:
            self._limits.unlock()
        self._take(account, 0, tokens - reserved)

    # --- agents of other regions

    def charge(self, charges: Iterable[Charge], now: float) -> None:
        """Drain the buckets by what other agents have let in."""
        self.fill(now)
        for charge in charges:
            if charge.key in self._by_name:
                account = self._tenant(charge.key, now)
                self._limits.lock(now)
                account.charge(charge.requests, charge.tokens, charge.catching_up)
                self._limits.unlock()

    def fill(self, now: float) -> None:
        """Bring all levels up to now: the share by which they are filled may change."""
        for account in self._tenants.values():
            self._limits.lock(now)
            self._fill(account, now)
            self._limits.unlock()

    def _fill(self, account: Tenant, now: float) -> None:
        account.fill(now, 1.0 if self.quota is None else self.quota.share)

    def _left(self, account: Tenant) -> tuple[int, int]:
        return (0, 0) if self.quota is None else self.quota.reserved(account.key.name)

    def _take(self, account: Tenant, requests: int, tokens: int) -> None:
        if self.quota is not None:
            self.quota.take(account.key.name, requests, tokens)


def _digest(header: bytes, value: bytes) -> bytes:
    """Return the digest of the key in a header; that of no key if it holds none."""
    if header == b"authorization":
        scheme, _, value = value.partition(b" ")
        if scheme.lower() != b"bearer":
            if scheme.lower() != b"basic":
                return b""
            value = _basic_key(value)
    return hashlib.sha256(value.strip()).digest()


def _basic_key(value: bytes) -> bytes:
    """Return the password of HTTP Basic, or the user name if the password is empty; nothing if it is malformed."""
    try:
        user, _, password = base64.b64decode(value.strip(), validate=True).partition(b":")
    except ValueError:
        return b""
    return password or user
