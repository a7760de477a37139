"""`ServiceSpec` <-> JSON, for the database, the API and `serve validate`. Secret values are not in a spec, so never in its JSON.

The JSON has the sections of the service file: `replica_policy` holds the keys of `ScalingGoal`, `PlacementGoal` and four
of the spec, `load_balancer` those of `Limits` that a file may set, an API key its limits. This is the form of every version so far.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lb.config.key_limits import LIMITS as KEY_LIMITS
from skyserve_cli.spec.check import sentence_of
from skyserve_cli.spec.model import ServiceSpec
from skyserve_cli.spec.placement import placement_of
from skyserve_cli.spec.problems import Problem, SpecError, dotted

#: What the JSON calls the limits of a load balancer that a file may set.
LIMITS: Mapping[str, str] = {
    "stream_timeout_s": "idle_timeout_s",
    "time_to_first_byte_s": "time_to_first_byte_s",
    "stall_timeout_s": "stall_timeout_s",
    "keepalive_s": "stream_keepalive_s",
    "max_body_bytes": "max_body_bytes",
    "min_upload_bytes_per_s": "min_upload_bytes_per_s",
    "queue_size": "max_held",
    "queue_timeout_s": "hold_s",
}
_OF_THE_SPEC = ("load_window_s", "max_usd_hour", "slo", "schedule")
_OF_THE_GOAL = ("work", "one_continent")  # which follow from the rest: see `goal_of`


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `placement_of` reads. None, and names that stand for another placer, are of earlier versions."""

    spot_placer: str | None = None
    dynamic_ondemand_fallback: bool | None = None


_SPEC = TypeAdapter(ServiceSpec)
_ASKED = TypeAdapter(_Asked)
_ASKED_KEYS = tuple(one.name for one in fields(_Asked))


def spec_to_json(spec: ServiceSpec) -> dict[str, Any]:
    """Return every field, defaults included: a stored spec keeps its meaning when a default changes."""
    document: dict[str, Any] = _SPEC.dump_python(spec, mode="json")
    scaling, placement = document.pop("scaling"), document.pop("placement")
    for name in _OF_THE_GOAL:
        del placement[name]
    del scaling["slo"]
    placement["spot_placer"] = placement.pop("placer")
    own = {name: document.pop(name) for name in _OF_THE_SPEC}
    document["replica_policy"] = {**scaling, **placement, **own}
    balancer = document["load_balancer"]
    limits = balancer.pop("limits")
    document["load_balancer"] = {name: limits[key] for name, key in LIMITS.items()} | balancer
    access = balancer["access"]
    access["prices"] = dict(access["prices"])
    for key in access["keys"]:
        key |= key.pop("limits")
        key["models"] = dict(key["models"])
    return document


def spec_from_json(document: Mapping[str, Any]) -> ServiceSpec:
    """Return the inverse.

    Fields it lacks take their default and unknown ones are skipped, so that a program of another age can read it. Raises
    SpecError if a field does not fit. What a spec may say is checked before it is stored, by `sent.sent_spec`.
    """
    policy, balancer = _section(document, "replica_policy"), _section(document, "load_balancer")
    knobs = {name: value for name, value in policy.items() if name != "dynamic_ondemand_fallback"}
    limits = {key: balancer[name] for name, key in LIMITS.items() if name in balancer}
    try:
        asked = _ASKED.validate_python(policy)
        spec = _SPEC.validate_python(
            {
                **document,
                "scaling": {name: value for name, value in policy.items() if name != "slo"},
                "placement": knobs,
                **{name: policy[name] for name in _OF_THE_SPEC if name in policy},
                "load_balancer": {
                    **balancer,
                    "limits": limits,
                    "access": _access(balancer.get("access", {})),
                },
            }
        )
    except ValidationError as error:
        raise SpecError(_problems(error)) from None
    placement = placement_of(
        spec.placement,
        spec.resources,
        spot_placer=asked.spot_placer,
        dynamic_ondemand_fallback=asked.dynamic_ondemand_fallback,
    )
    return replace(spec, placement=placement)


def _access(value: object) -> object:
    """Return the access as `Access` has it; what is no mapping is left for pydantic to reject."""
    if not isinstance(value, Mapping):
        return value
    keys = value.get("keys", ())
    return {
        **value,
        "keys": [_key(one) for one in keys] if isinstance(keys, list) else keys,
        "prices": _pairs(value.get("prices", ())),
    }


def _key(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    limits = {name: value[name] for name in KEY_LIMITS if name in value}
    return {**value, "limits": limits, "models": _pairs(value.get("models", ()))}


def _pairs(value: object) -> object:
    return list(value.items()) if isinstance(value, Mapping) else value


def _section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = document.get(name, {})
    if not isinstance(section, Mapping):
        raise SpecError([Problem(name, "must be a mapping")])
    return section


def _problems(error: ValidationError) -> Iterator[Problem]:
    """Yield the problems, by the paths of the JSON; no value, for it may be a secret's."""
    names = {key: name for name, key in LIMITS.items()}
    for each in error.errors(include_url=False, include_input=False):
        loc = each["loc"]
        if loc[0] in ("scaling", "placement"):
            loc = ("replica_policy", *loc[1:])
        elif loc[0] in (*_OF_THE_SPEC, *_ASKED_KEYS):
            loc = ("replica_policy", *loc)
        elif loc[:2] == ("load_balancer", "limits"):
            loc = (loc[0], *(names.get(str(key), key) for key in loc[2:]))
        elif loc[:3] == ("load_balancer", "access", "keys"):
            loc = tuple(part for part in loc if part != "limits")
        yield Problem(dotted(loc), sentence_of(each))
