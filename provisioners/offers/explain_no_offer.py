"""Why a candidate has no offer: the first of its wishes that leaves no row, in one sentence, with what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from policies.model import Zone
from provisioners.offers.catalog.model import Catalog, Row
from provisioners.offers.matching import (
    ANY_ACCOUNT,
    NO_RESERVATION,
    Account,
    given,
    market_of,
    price_of,
    tests_of,
)
from provisioners.port.accelerator_names import canonical, close_to, sister_of
from provisioners.port.base import Candidate

_SHOWN = 8  # names of a list; more are not read
_REASONS = 3


@dataclass(frozen=True, slots=True)
class NoOffer:
    """`field` is the candidate's field that left nothing ("usable": the account); `hint` what may help."""

    field: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


@runtime_checkable
class Explaining(Protocol):
    """A provisioner that makes offers of its own, and can say why there are none."""

    def explain_no_offer(self, candidate: Candidate) -> NoOffer | None:
        """Return which wish of the candidate left nothing; None if it has an offer, or the reason is unknown."""
        ...


@dataclass(frozen=True, slots=True)
class _Case:
    """`left` are the rows that everything before the field in question has left: never none."""

    candidate: Candidate
    left: Sequence[Row]
    catalog: Catalog
    account: Account

    @property
    def what(self) -> str:
        asked = self.candidate
        if asked.accelerator is not None:
            return f"{canonical(asked.accelerator)}:{asked.accelerator_count:g}"
        return given(asked.instance_type) or "a machine without accelerators"

    @property
    def clouds(self) -> str:
        return " or ".join(_names(row.zone.cloud for row in self.left))


def explain_no_offer(
    candidate: Candidate,
    catalog: Catalog,
    account: Account = ANY_ACCOUNT,
    usable: Callable[[Zone], bool] = lambda zone: True,
) -> NoOffer | None:
    """None if the candidate has an offer. The catalog may have more than is `usable` here, for the sake of the hints."""
    left: Sequence[Row] = [row for row in catalog.rows if usable(row.zone)]
    if not left:
        return NoOffer("cloud", "the catalog is empty")
    for field, test in tests_of(candidate, account):
        kept = [row for row in left if test(row)]
        if not kept:
            message, hint = _SENTENCES[field](_Case(candidate, left, catalog, account))
            return NoOffer(field, message, hint)
        left = kept
    return None


_Sentence = tuple[str, str | None]


def _no_cloud(case: _Case) -> _Sentence:
    wanted = case.candidate.cloud or ""
    return f"the catalog has no cloud {wanted!r}", _meant(wanted, case.catalog.clouds)


def _no_instance_type(case: _Case) -> _Sentence:
    wanted = case.candidate.instance_type or ""
    known = _names(row.shape.name for row in case.left)
    return f"the catalog has no instance type {wanted!r} on {case.clouds}", _meant(wanted, known)


def _no_accelerator(case: _Case) -> _Sentence:
    wanted = case.candidate.accelerator
    if wanted is None:
        return f"the catalog has no machine without accelerators on {case.clouds}", None
    known = _names(row.shape.accelerator for row in case.left)
    instance_type = given(case.candidate.instance_type)
    if instance_type is not None:
        return f"{instance_type} has {_listed(known) or 'no accelerator'}, not {wanted}", None
    elsewhere = case.catalog.by_accelerator.get(canonical(wanted), ())
    if elsewhere:
        where = _listed(_names(row.zone.cloud for row in elsewhere))
        return f"{case.clouds} has no {canonical(wanted)}", f"the catalog has it on {where}"
    message = f"the catalog has no accelerator {wanted!r}"
    sister = sister_of(wanted)
    if sister is not None and sister in case.catalog.by_accelerator:
        where = _listed(_names(row.zone.cloud for row in case.catalog.by_accelerator[sister]))
        return message, f"{sister} is the card nearest to it, on {where}"
    hint = _meant(wanted, case.catalog.accelerators) or f"it has {_listed(case.catalog.accelerators)}"
    return message, hint


def _no_count(case: _Case) -> _Sentence:
    counts = _numbers(row.shape.accelerator_count for row in case.left)
    name, count = canonical(case.candidate.accelerator or ""), case.candidate.accelerator_count
    return f"no machine has {count:g} of {name}", f"there are machines with {counts}"


def _no_cpus(case: _Case) -> _Sentence:
    sizes = _numbers(row.shape.vcpus for row in case.left)
    return f"{case.what} does not come with {case.candidate.cpus} CPUs", f"it comes with {sizes}"


def _no_memory(case: _Case) -> _Sentence:
    sizes = _numbers(row.shape.memory_gib for row in case.left)
    return f"{case.what} does not come with {case.candidate.memory} GB of memory", f"it comes with {sizes}"


def _not_on_demand(case: _Case) -> _Sentence:
    types = _listed(_names(row.shape.name for row in case.left))
    return f"{case.what} is not sold on demand, but as spot or by reservation ({types})", "set use_spot: true"


def _no_reservation(case: _Case) -> _Sentence:
    wanted = case.candidate.reservation or ""
    if wanted == NO_RESERVATION:
        return f"{case.what} is there by reservation only", "leave reservation out"
    known = _names(row.zone.reservation or None for row in case.catalog.rows)
    if wanted in known:
        of = next(row for row in case.catalog.rows if row.zone.reservation == wanted)
        return (
            f"the reservation {wanted!r} is of {of.shape.name} on {of.zone.cloud}, and has no {case.what}",
            None,
        )
    return (
        f"config.yaml has no reservation {wanted!r} on {case.clouds}",
        _meant(wanted, known)
        or (f"it has {_listed(known)}" if known else "name it under clouds.CLOUD.reservations"),
    )


def _reserved(case: _Case) -> _Sentence:
    return f"{case.what} is reserved, and no spot machine", "set use_spot: false"


def _no_region(case: _Case) -> _Sentence:
    wanted = given(case.candidate.region) or ""
    here = _names(row.zone.region for row in case.left)
    if any(row.zone.region == wanted for row in case.catalog.rows):
        return f"{case.what} is not in {wanted}", f"the catalog has it in {_listed(here)}"
    clouds = {row.zone.cloud for row in case.left}
    known = _names(row.zone.region for row in case.catalog.rows if row.zone.cloud in clouds)
    return f"the catalog has no region {wanted!r} on {case.clouds}", _meant(wanted, known)


def _no_zone(case: _Case) -> _Sentence:
    wanted = given(case.candidate.zone) or ""
    here = _names(row.zone.name for row in case.left)
    if {row.zone.cloud for row in case.left} == {"aws"} and wanted[-1:].isalpha():
        hint = f"name its id, which is the same in every account: {_listed(here)}"
        return f"which zone {wanted!r} is, only the account knows", hint
    meant = _meant(wanted, here) if len(here) > _SHOWN else None  # a few are better listed than guessed
    return f"{case.what} is not in zone {wanted!r}", meant or f"the catalog has it in {_listed(here)}"


def _not_usable(case: _Case) -> _Sentence:
    reason, market = case.account.reason, market_of(case.candidate)
    why = (reason(row.shape, row.zone, market) for row in case.left) if reason is not None else ()
    known = _names(sentence or None for sentence in why)
    # A quota can be raised, and what a cloud does not offer cannot be changed.
    known.sort(key=lambda sentence: "does not offer" in sentence)
    more = f", and {len(known) - _REASONS} more" if len(known) > _REASONS else ""
    sold = market.value.replace("_", "-")
    sentence = f"this account cannot have {case.what} as {sold} in the zones that were asked for"
    return (
        f"{sentence}: {'; '.join(known[:_REASONS])}{more}" if known else sentence,
        "once that has changed, `serve catalog discover` finds it",
    )


def _too_dear(case: _Case) -> _Sentence:
    prices = ((price_of(row, case.candidate, case.account), row) for row in case.left)
    least, row = min(prices, key=lambda priced: (priced[0], priced[1].zone))
    cheapest = f"{row.shape.name} in {row.zone.cloud}/{row.zone.name}"
    most = case.candidate.max_hourly_cost or 0.0
    return f"{case.what} costs {least:g} USD per hour or more ({cheapest})", f"max_hourly_cost is {most:g}"


_SENTENCES: Mapping[str, Callable[[_Case], _Sentence]] = MappingProxyType(
    {
        "cloud": _no_cloud,
        "instance_type": _no_instance_type,
        "accelerator": _no_accelerator,
        "accelerator_count": _no_count,
        "cpus": _no_cpus,
        "memory": _no_memory,
        "reservation": _no_reservation,
        "use_spot": _reserved,
        "on_demand": _not_on_demand,
        "region": _no_region,
        "zone": _no_zone,
        "usable": _not_usable,
        "max_hourly_cost": _too_dear,
    }
)


def _meant(word: str, known: Iterable[str]) -> str | None:
    close = close_to(word, known)
    return f"did you mean {close!r}?" if close else None


def _names(names: Iterable[str | None]) -> list[str]:
    return sorted({name for name in names if name is not None})


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _numbers(numbers: Iterable[float]) -> str:
    return _listed([f"{number:g}" for number in sorted(set(numbers))])
