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

Limits per minute are token buckets. A bucket holds one minute's worth and fills evenly: a tenant that was
idle may send a minute's worth at once (as people read "60 per minute"), and over any t minutes it gets no more than 1 + t
minutes' worth. A request takes 1 from the bucket of requests. From the bucket of tokens it takes its prompt and the tokens
it is expected to generate, which is `max_tokens`, or what nine of ten of the tenant's responses have had lately if that is
less (see `lb.core.tenant.PastResponses`); `settle` replaces this reservation by what was used. A request is let in while the
bucket holds at least one token, and may take it below zero; the debt is paid by waiting. So a request that is larger than a
whole bucket passes when its turn comes, and n requests in parallel get the limit plus one request, not n times as much.
Tokens used beyond the expectation are charged in full, afterwards. Prompts (input) and responses (output) may have buckets of their own.

Limits per day and month count what was used since the day or month began, in UTC, and what is reserved; a request is let in while
this is below the limit. What tokens cost in US dollars is by the price of the model that the request names.

`max_concurrent` bounds the requests between `admit_head` and `settle`, held ones included.

A key may have further limits of single models, by the name in the request (`lb.core.tenant.Tenant.of_model`). They are checked by
`reserve`, because the name is in the body.

Several keys of one name are one tenant (an old key and its successor): they share the buckets, and the limits are those
of the one listed last. The numbers are kept in a `LimitStore`, which several processes may share; agents of other regions
have numbers of their own, and charge each other what they let in (`lb.core.shared_quota`). What an agent has missed, of days and months,
the controller sends it (`counted`).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from lb.config.key_limits import FREE, Price, price_of
from lb.config.options import Access, ApiKey
from lb.config.usage import KeyTotal, UsageTotals
from lb.core.calendar import calendar_of
from lb.core.hop import RequestHop
from lb.core.limit_store import LimitStore, MemoryLimits
from lb.core.quota import NO_LIMIT, NOTHING, Amount, Left, Limited, Quota, Spending, names_in
from lb.core.residency import ANYWHERE
from lb.core.shared_quota import Charge, SharedQuota
from lb.core.tenant import Tenant

__all__ = [
    "ANONYMOUS",
    "Admission",
    "AlreadySettledError",
    "ApiKeyStore",
    "Limited",
    "Unauthorized",
    "Usage",
]

ANONYMOUS: Final = ""
MOST_SHOWN: Final = 1000
_MOST_OWNERS: Final = 512


class AlreadySettledError(Exception):
    """A request's account was used after it had been settled."""


class Unauthorized(NamedTuple):
    """No key, or none that is known: 401."""

    given: bool  # there was a header for a key, though with a wrong one


class Usage(NamedTuple):
    """A tenant's account, of its key or of one of its models.

    `admitted`, `limited` and `tokens` are this process's since its start, of all models; the rest of the buckets (None without a
    limit), reservations and requests in flight are those of all that share the limits. So is what was used on this day and in
    this month (None without limits of days or months).
    """

    tenant: str
    model: str
    admitted: int
    limited: int
    tokens: int
    requests_left: float | None
    tokens_left: float | None
    input_tokens_left: float | None
    output_tokens_left: float | None
    reserved: int
    in_flight: int
    requests_today: int | None
    tokens_today: int | None
    tokens_this_month: int | None
    usd_this_month: float | None


class Admission:
    """A request that was let in, from `admit_head` to `settle`.

    Its place among the tenant's requests under way; the tokens of its prompt, as estimated, those it has reserved, and those
    it was charged. `carried_by` names the headers, in lower case, and other places (`lb.http.key_carriers`) whose keys must not reach
    a target. `hop` is that of a request which was let in, and is charged, by an agent of another region.
    `zones` are those of the key's residency (see `lb.core.residency`).
    """

    __slots__ = (
        "_account",
        "_of_model",
        "_price",
        "_quotas",
        "_settled",
        "_wanted",
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
        self._of_model: Quota | None = None
        self._price = FREE
        self._quotas: tuple[Quota, ...] = ()  # that hold what it wants
        self._wanted: Spending | None = None
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
    def reads_body(self) -> bool:
        """Whether the limits of its key depend on what is in the body: tokens, or the model."""
        return self._account is not None and self._account.reads_bodies

    @property
    def limits_models(self) -> bool:
        """Whether its key has limits of single models."""
        return self._account is not None and self._account.models is not None

    def left(self) -> Left:
        """Return what is left of the limits per minute of its key and model, reservations taken off."""
        return NO_LIMIT if self._account is None else self._account.left(self._of_model)

    def may_use(self, path: bytes) -> bool:
        """Return whether the key may use a path whose work nothing counts."""
        account = self._account
        return account is None or any(
            path.startswith(allowed[:-1].encode()) if allowed.endswith("*") else path == allowed.encode()
            for allowed in account.key.paths
        )


_NO_KEY: Final = Unauthorized(False)
_WRONG_KEY: Final = Unauthorized(True)


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
        self._by_digest: dict[str, ApiKey] = {}
        self._owners: dict[
            tuple[tuple[bytes, bytes], ...], tuple[str, tuple[bytes, ...]]
        ] = {}  # of credentials that have come lately, with the known keys among them
        self._by_name: dict[str, ApiKey] = {}  # of several keys of one name, the one that is listed last
        self._tenants: dict[str, Tenant] = {}  # those that have sent a request
        self._prices: dict[str, Price] = {}
        self.of_calendar = False  # whether any key has limits of days or months
        self.today = calendar_of(now, now)
        self.apply(access, now)

    def apply(self, access: Access, now: float) -> None:
        """Other keys are in force. Tenants that stay keep the levels of their buckets."""
        self._by_digest = {key.sha256: key for key in access.keys}
        self._owners = {}
        self._by_name = {key.name: key for key in access.keys}
        self._guards = bool(access.keys or access.keys_file)
        self._prices = dict(access.prices)
        self.of_calendar = any(key.of_calendar for key in access.keys)
        self._tenants = {name: tenant for name, tenant in self._tenants.items() if name in self._by_name}
        changed = [one for name, one in self._tenants.items() if one.key is not self._by_name[name]]
        for tenant in changed:
            self._change(tenant, now)

    def _tenant(self, name: str, now: float) -> Tenant:
        """Return the owner of keys that are in force. One without requests costs no memory and no row of the limits."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(self._by_name[name], self._limits)
            self._change(tenant, now)
        return tenant

    def _change(self, tenant: Tenant, now: float) -> None:
        tenant.use(self._by_name[tenant.key.name], self._limits)
        stamp = self._limits.lock(now)
        try:
            tenant.change(stamp, now, self.today)
        finally:
            self._limits.unlock()

    # --- the account of one request

    def admit_head(
        self, credentials: tuple[tuple[bytes, bytes], ...], now: float
    ) -> Admission | Unauthorized | Limited:
        """Return what becomes of a request with these headers for keys: (name in lower case, value), as they came.

        Checks the limits and takes one request. The first header that carries a known key decides whose it is.
        """
        if not self._guards:
            return Admission(None, ())
        found = self._owners.get(credentials)
        if found is None:
            found = self._owner(credentials)
            if found is None:
                return _WRONG_KEY if credentials else _NO_KEY
        owner, carried_by = found
        account = self._tenants.get(owner)
        if account is None:
            account = self._tenant(owner, now)
        refusal = self._enter(account, now)
        if refusal is not None and self._limits.reap(now):
            refusal = self._enter(account, now)
        if refusal is not None:
            account.limited += 1
            return refusal
        account.admitted += 1
        return Admission(account, carried_by)

    def _owner(self, credentials: tuple[tuple[bytes, bytes], ...]) -> tuple[str, tuple[bytes, ...]] | None:
        """Return the tenant whose key is among these, and which of them are known keys; remember it: a digest takes its time."""
        owner = ""
        carried_by: tuple[bytes, ...] = ()
        for header, value in credentials:
            key = self._by_digest.get(_digest(header, value))
            if key is not None:
                owner = owner or key.name
                carried_by += (header,)
        if not carried_by:
            return None
        if len(self._owners) < _MOST_OWNERS:  # else most would be forgotten before they come again
            self._owners[credentials] = owner, carried_by
        return owner, carried_by

    def reserve(
        self,
        admission: Admission,
        model: str,
        prompt_tokens: int,
        max_tokens: int | None,
        now: float,
        choices: int = 1,
    ) -> Limited | None:
        """Take the tokens that the request is expected to use, at most once; None if it may go on.

        `model` is the one that it names, empty: none. `max_tokens` is the client's limit on generated tokens, over all `choices`; None or
        below zero is no limit. A request that is refused here has taken no request from its buckets; it is still to be settled.
        """
        account = admission._account
        if admission._settled or admission._wanted is not None:
            raise AlreadySettledError("a request reserves its tokens once, before it is settled")
        admission.prompt_tokens, admission.most_out = prompt_tokens, max_tokens
        if account is None or not account.reads_bodies:
            return None
        generated = account.expected * choices
        if max_tokens is not None and max_tokens >= 0:
            generated = min(generated, max_tokens)
        usd = 0.0
        if self._prices:
            price = admission._price = price_of(self._prices, model)
            usd = price.usd(prompt_tokens, generated)
        wanted = Spending(prompt_tokens, generated, usd)
        whole, of_model = account.whole, account.of_model(model)
        stamp = self._limits.lock(now)
        try:
            whole.load(stamp)
            if not whole.is_filled(now):
                self._fill(whole, now)
            refusal = whole.lacks_tokens(self._left(whole), now, self.today)
            if refusal is None and of_model is not None:
                of_model.load(stamp)
                self._fill(of_model, now)
                refusal = of_model.exceeded(self._left(of_model), now, self.today)
            if refusal is not None:
                account.admitted -= 1
                account.limited += 1
                if whole.is_limited:
                    whole.was_refused()
                    whole.save()
                    self._take(whole, -1)
                return refusal
            quotas: tuple[Quota, ...] = (whole,) if whole.counts_tokens else ()
            if of_model is not None:
                of_model.enter()
                of_model.save()
                if of_model.counts_tokens:
                    quotas += (of_model,)
            for quota in quotas:
                quota.reserve(wanted)
                quota.save()
        finally:
            self._limits.unlock()
        if self.quota is not None:
            if of_model is not None:
                self.quota.take(of_model.name, 1)
            for quota in quotas:
                self.quota.take(quota.name, 0, prompt_tokens, generated)
        admission._of_model, admission._wanted, admission._quotas = of_model, wanted, quotas
        admission.reserved = prompt_tokens + generated if quotas else 0
        return None

    def settle(
        self, admission: Admission, tokens_in: int, tokens_out: int, now: float, generated: int | None = None
    ) -> None:
        """Charge a request that is over: the tokens of its prompt, and those of its response.

        `generated` is how many tokens each choice of a response has that is whole; None: there is none to learn from.
        Raises AlreadySettledError the second time.
        """
        if admission._settled:
            raise AlreadySettledError(f"a request of {admission.tenant!r} has been settled before")
        admission._settled = True
        account = admission._account
        if account is None:
            return
        whole, of_model = account.whole, admission._of_model
        whole.leave()
        admission.charged = tokens_in + tokens_out
        if generated is not None:
            account.learn(generated)
        account.used += tokens_in + tokens_out
        wanted, quotas = admission._wanted, admission._quotas
        if of_model is not None:
            of_model.leave()
        price = admission._price
        if wanted is None and whole.counts_tokens and (tokens_in or tokens_out):
            quotas = (whole,)  # of a path whose work is not known before, nor its model
            price = price_of(self._prices, "")
        if not quotas:
            return
        usd = 0.0 if price is FREE else price.usd(tokens_in, tokens_out)
        spent = Spending(tokens_in, tokens_out, usd)
        stamp = self._limits.lock(now)
        try:
            for quota in quotas:
                quota.load(stamp)
                quota.settle(wanted, spent)
                quota.save()
        finally:
            self._limits.unlock()
        if self.quota is not None:
            held_in, held_out = (0, 0) if wanted is None else (wanted.tokens_in, wanted.tokens_out)
            micro_usd = round(usd * 1e6) if usd else 0
            for quota in quotas:
                self.quota.take(quota.name, 0, tokens_in - held_in, tokens_out - held_out, micro_usd)

    def look(self, unix_s: float, now: float) -> None:
        """See what day it is, and who has gone. Called every second."""
        self.today = calendar_of(unix_s, now)
        self._limits.reap(now)
        if len(self._owners) >= _MOST_OWNERS:
            self._owners.clear()

    def usage(self, now: float) -> Iterator[Usage]:
        """Yield every tenant's accounts; of more than MOST_SHOWN, those that have sent a request."""
        self._limits.reap(now)
        for name in list(self._by_name if len(self._by_name) <= MOST_SHOWN else self._tenants):
            tenant = self._tenant(name, now)
            for quota in tenant.quotas():
                self._refill(quota, now)
                left, used = quota.levels(), quota.used()
                day, month, usd = (None, None, None) if used is None else used
                yield Usage(
                    name,
                    quota.model,
                    tenant.admitted,
                    tenant.limited,
                    tenant.used,
                    left[0],
                    left[1],
                    left[2],
                    left[3],
                    sum(quota.reserved()),
                    quota.in_flight(),
                    None if day is None else day.requests,
                    None if day is None else day.tokens_in + day.tokens_out,
                    None if month is None else month.tokens_in + month.tokens_out,
                    usd,
                )

    def _enter(self, account: Tenant, now: float) -> Limited | None:
        """Take one request and a place among those under way, unless a limit is reached."""
        whole = account.whole
        if not whole.is_limited:
            whole.enter()
            return None
        stamp = self._limits.lock(now)
        try:
            whole.load(stamp)
            self._fill(whole, now)
            refusal = whole.exceeded(self._left(whole), now, self.today)
            if refusal is None:
                whole.enter()
                whole.save()
                self._take(whole, 1)
        finally:
            self._limits.unlock()
        return refusal

    # --- agents of other regions, and the controller

    def charge(self, charges: Iterable[Charge], now: float) -> None:
        """Drain the buckets by what other agents have let in."""
        self.fill(now)
        for charge in charges:
            for quota in self._named(charge.name, now):
                stamp = self._limits.lock(now)
                try:
                    quota.load(stamp)
                    quota.charge(charge.used, charge.micro_usd / 1e6, charge.catching_up, charge.is_news)
                    quota.save()
                finally:
                    self._limits.unlock()

    def counted(self, totals: UsageTotals, now: float) -> None:
        """All agents together have used this much, some seconds ago."""
        if totals.day != self.today.day:
            return
        by_key: dict[str, list[KeyTotal]] = {}
        for row in totals.rows:
            if row.key in self._by_name and self._by_name[row.key].of_calendar:
                by_key.setdefault(row.key, []).append(row)
        for name, rows in by_key.items():
            tenant = self._tenant(name, now)
            for quota in tenant.quotas():
                of_quota = [row for row in rows if not quota.model or tenant.of_model(row.model) is quota]
                stamp = self._limits.lock(now)
                try:
                    quota.load(stamp)
                    self._fill(quota, now)
                    quota.counted(*self._totals(of_quota))
                    quota.save()
                finally:
                    self._limits.unlock()

    def _totals(self, rows: Iterable[KeyTotal]) -> tuple[Amount, Amount, float]:
        """Return the sums of today and of this month, and what the latter cost."""
        today, month, usd = [0, 0, 0], [0, 0], 0.0
        for row in rows:
            for at, number in enumerate((row.requests_today, row.tokens_in_today, row.tokens_out_today)):
                today[at] += number
            month[0] += row.tokens_in_month
            month[1] += row.tokens_out_month
            usd += price_of(self._prices, row.model).usd(row.tokens_in_month, row.tokens_out_month)
        return Amount(*today), Amount(0, *month), usd

    def _named(self, name: str, now: float) -> list[Quota]:
        """Return the quota of that name, if it is in force here."""
        owner, model = names_in(name)
        if owner not in self._by_name:
            return []
        tenant = self._tenant(owner, now)
        return [quota for quota in tenant.quotas() if quota.model == model]

    def fill(self, now: float) -> None:
        """Bring all levels up to now: the share by which they are filled may change."""
        for account in self._tenants.values():
            for quota in account.quotas():
                self._refill(quota, now)

    def _refill(self, quota: Quota, now: float) -> None:
        stamp = self._limits.lock(now)
        try:
            quota.load(stamp)
            self._fill(quota, now)
            quota.save()
        finally:
            self._limits.unlock()

    def _fill(self, quota: Quota, now: float) -> None:
        """Bring a quota up to now, under the lock."""
        quota.fill(now, self.today, 1.0 if self.quota is None else self.quota.share)

    def _left(self, quota: Quota) -> Amount:
        return NOTHING if self.quota is None else self.quota.reserved(quota.name)

    def _take(self, quota: Quota, requests: int) -> None:
        if self.quota is not None:
            self.quota.take(quota.name, requests)


def _digest(header: bytes, value: bytes) -> str:
    """Return the digest of the key in a header; that of no key if it holds none."""
    if header == b"authorization":
        scheme, _, value = value.partition(b" ")
        if scheme.lower() != b"bearer":
            if scheme.lower() != b"basic":
                return ""
            value = _basic_key(value)
    return hashlib.sha256(value.strip()).hexdigest()


def _basic_key(value: bytes) -> bytes:
    """Return the password of HTTP Basic, or the user name if the password is empty; nothing if it is malformed."""
    try:
        user, _, password = base64.b64decode(value.strip(), validate=True).partition(b":")
    except ValueError:
        return b""
    return password or user
