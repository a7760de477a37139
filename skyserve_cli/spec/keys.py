"""API keys: from the variables that hold them to the digests that are kept.

A key opens the endpoint, so it is treated as secrets are: it is never in the file, nor in the spec, the database or
what a load balancer gets. It is hashed here, while the file is read. The digest carries no salt (see `lb.core.api_keys`), so
a key that could be guessed is refused.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lb.config.key_limits import NO_LIMITS, OTHER_MODELS
from lb.config.options import ApiKey
from skyserve_cli.spec.balancer import ApiKeySection, key_limits
from skyserve_cli.spec.check import Sound
from skyserve_cli.spec.problems import Loc, Problem, dotted
from skyserve_cli.spec.schema import ServiceSection
from skyserve_cli.spec.variables import Variables

SHORTEST_KEY = 16
_AT = ("service", "load_balancer", "api_keys")
_PRICES = ("service", "load_balancer", "prices")


@dataclass(slots=True)
class Keys:
    """The keys of a file, and what was wrong with them."""

    keys: list[ApiKey] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    missing: list[Problem] = field(default_factory=list)
    """Keys whose variable has no value."""


def digests(
    service: ServiceSection | None, variables: Variables, environ: Mapping[str, str], sound: Sound
) -> Keys:
    """A key is looked for among the secrets of the file, then in the user's environment."""
    found = Keys()
    entries = service.load_balancer.api_keys if service is not None else None
    if service is None or entries is None or not sound(*_AT):
        return found
    if not entries:
        found.problems.append(
            Problem(dotted(_AT), "names no key, so no client could call; leave it out for all")
        )
    priced = OTHER_MODELS in service.load_balancer.prices or not sound(*_PRICES)
    found.problems += _wrong_limits(entries, priced=priced)
    seen: dict[str, int] = {}
    for index, entry in enumerate(entries):
        digest = _digest(entry, index, variables, environ, found)
        if digest is None:
            continue
        if digest in seen:
            message = f"is the same key as api_keys[{seen[digest]}]"
            found.problems.append(Problem(dotted((*_AT, index)), message))
        seen[digest] = index
        found.keys.append(
            ApiKey(
                name=entry.name,
                sha256=digest,
                limits=key_limits(entry),
                weight=entry.weight,
                residency=entry.residency or "",
                paths=entry.paths,
                models=tuple((name, key_limits(one)) for name, one in entry.models.items()),
            )
        )
    return found


def _wrong_limits(entries: Sequence[ApiKeySection], *, priced: bool) -> Iterator[Problem]:
    """`priced`: every model has a price."""
    unpriced = (
        f'needs an entry "{OTHER_MODELS}" in load_balancer.prices: models without a price would be free'
    )
    for index, entry in enumerate(entries):
        at: Loc = (*_AT, index)
        if entry.usd_per_month is not None and not priced:
            yield Problem(dotted((*at, "usd_per_month")), unpriced)
        for name, one in entry.models.items():
            if one.usd_per_month is not None and not priced:
                yield Problem(dotted((*at, "models", name, "usd_per_month")), unpriced)
            if key_limits(one) == NO_LIMITS:
                yield Problem(dotted((*at, "models", name)), "has no limit; name one, or leave the model out")


def _digest(
    entry: ApiKeySection,
    index: int,
    variables: Variables,
    environ: Mapping[str, str],
    found: Keys,
) -> str | None:
    """Return the key's SHA-256; None if it is not available, which is then among the problems."""
    at = dotted((*_AT, index))
    name = entry.key_env
    if (name is None) == (entry.sha256 is None):
        said = "has both key_env and sha256" if name else "has neither key_env nor sha256"
        found.problems.append(Problem(at, f"{said}; one of them says which key it is"))
        return None
    if name is None:
        return entry.sha256
    path = f"{at}.key_env"
    key = variables.secrets.get(name, environ.get(name))
    if name in variables.envs:
        found.problems.append(
            Problem(path, f"{name} is one of envs, which are stored in the clear; move it to secrets")
        )
    elif key is None and name not in variables.secret_names:  # else it is said of the secret already
        found.missing.append(Problem(path, f"{name} has no value: export it, or make it one of secrets"))
    elif key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        found.problems.append(Problem(path, f"the value of {name} is not a key: one word of printable ASCII"))
    elif key is not None and len(key) < SHORTEST_KEY:
        found.problems.append(
            Problem(path, f"the value of {name} has fewer than {SHORTEST_KEY} characters: too easy to guess")
        )
    elif key is not None:
        return hashlib.sha256(key.encode()).hexdigest()
    return None
