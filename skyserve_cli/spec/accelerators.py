"""Accelerators in a service file: which, how many, and how many requests each carries."""

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import PlainValidator, WithJsonSchema

from policies.goals import AcceleratorQps
from skyserve_cli.spec.fields import refuse

_REST = r"[A-Za-z0-9._-]*"
# One word, or several in capitals: ``Gaudi HL-205``, but not ``an L4``.
_NAME = rf"[A-Za-z0-9]{_REST}|[A-Z]{_REST}(?: [A-Z0-9]{_REST})+"
_ACCELERATOR = re.compile(rf"\s*({_NAME})\s*(?::\s*([0-9.]+)\s*)?")
# How SkyPilot requests any GPU of a size: ``80GB+``, ``16GB:4``, ``nvidia:40GB+:2``.
_GPU_OF_A_SIZE = re.compile(r"([A-Za-z]+:)?[0-9]+[GMT]B\+?(:[0-9]+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Accelerators:
    """`choices` are (name, count); `ordered` if they were a list, which SkyPilot reads as a preference."""

    choices: tuple[tuple[str, float], ...]
    ordered: bool


def parse_accelerators(value: object) -> Accelerators:
    """``L4``, ``L4:2``, ``[L4, A100:8]`` (in this order), ``{L4: 1, A100: 8}`` or ``{L4:1, A10g}`` (cheapest)."""
    if isinstance(value, str):
        return Accelerators((_accelerator(value, ()),), ordered=False)
    if isinstance(value, list) and value:
        choices = tuple(_accelerator(item, (index,)) for index, item in enumerate(value))
        return Accelerators(choices, ordered=len(choices) > 1)
    if isinstance(value, dict) and value:
        return Accelerators(tuple(_accelerator_entry(*entry) for entry in value.items()), ordered=False)
    raise refuse("must be an accelerator like L4 or L4:2, or a list or mapping of some", value)


def _accelerator(value: object, at: tuple[str | int, ...]) -> tuple[str, float]:
    name, count = _name_and_count(value, at)
    return name, 1.0 if count is None else count


def _accelerator_entry(key: str, value: object) -> tuple[str, float]:
    name, count = _name_and_count(key, (key,))
    if value is None:
        return name, 1.0 if count is None else count
    if count is not None:
        raise refuse("the count is given twice, in the key and as the value", value, at=(key,))
    return name, _positive(value, (key,), "the count")


def _name_and_count(value: object, at: tuple[str | int, ...]) -> tuple[str, float | None]:
    if isinstance(value, str) and _GPU_OF_A_SIZE.fullmatch(value):
        hint = "name the accelerators that will do, like {L4, A100-80GB}"
        raise refuse("accelerators cannot be chosen by their memory yet", value, at=at, hint=hint)
    match = _ACCELERATOR.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise refuse("must be an accelerator like L4 or A100-80GB:8", value, at=at)
    count = None if match[2] is None else _positive(match[2], at, "the count")
    return match[1], count


AcceleratorsValue = Annotated[
    Accelerators,
    PlainValidator(parse_accelerators),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "object", "additionalProperties": {"type": ["number", "null"]}, "minProperties": 1},
            ]
        }
    ),
]


def parse_target_qps(value: object) -> float | tuple[AcceleratorQps, ...]:
    """Return a number, or a mapping from accelerator (with or without a count) to a number."""
    if isinstance(value, dict) and value:
        entries = []
        for key, number in value.items():
            name, count = _name_and_count(key, (key,))
            entries.append(AcceleratorQps(name, count, _positive(number, (key,), "requests per second")))
        return tuple(entries)
    return _positive(value, (), "requests per second")


TargetQps = Annotated[
    float | tuple[AcceleratorQps, ...],
    PlainValidator(parse_target_qps),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "pattern": r"^\$"},
                {"type": "object", "additionalProperties": {"type": "number", "exclusiveMinimum": 0}},
            ]
        }
    ),
]


def _positive(value: object, at: tuple[str | int, ...], what: str) -> float:
    number: float | None = None
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = None
    if number is None or not 0 < number <= 1e9:
        raise refuse(f"{what} must be a number above 0", value, at=at)
    return number
