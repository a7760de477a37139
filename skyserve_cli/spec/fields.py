"""The values of a service file that have a grammar of their own, and their parsers.

SkyPilot allows several spellings for most of them (a word, a list, a mapping). Each parser takes any of them and
returns one shape, so that the sections of the schema have no unions and an error's place is the user's place.
"""

import json
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Annotated, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from policies.routing.names import NAMES, RETIRED
from skyserve_cli.spec.json_text import MAX_BYTES
from skyserve_cli.spec.model import Pairs
from skyserve_cli.spec.problems import did_you_mean, shown

_CPUS = re.compile(r"[0-9]+(\.[0-9]+)?\+?")
_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([kmgtp][bi]|[gmt])?([+x]?)", re.IGNORECASE)
# As SkyPilot counts: GB and Gi are the same, and so on.
_GB = {"k": 2.0**-20, "m": 2.0**-10, "g": 1.0, "t": 2.0**10, "p": 2.0**20}
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_MAX_PORTS = 1000
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


_UNSAID = object()


def refuse(
    sentence: str, value: object = _UNSAID, *, at: tuple[str | int, ...] = (), hint: str | None = None
) -> PydanticCustomError:
    """Return the error a parser raises; `at` leads from the field to the part of it that is wrong."""
    said = sentence if value is _UNSAID else f"{sentence} (got {shown(value)})"
    return PydanticCustomError("refused", "{sentence}", {"sentence": said, "at": at, "hint": hint})


# --- numbers and words ---------------------------------------------------------------------------------------


def not_bool(value: object) -> object:
    """YAML's ``yes`` is a bool and Python's bool is an int; a number of replicas is neither."""
    if isinstance(value, bool):
        raise refuse("must be a number", value)
    return value


def _as_text(value: object) -> object:
    """``zone: 1`` and ``X-Version: 2`` are meant as text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


_MONTH_S = 30 * 24 * 3600
Count = Annotated[int, BeforeValidator(not_bool), Field(ge=0, le=10_000)]
Nodes = Annotated[int, BeforeValidator(not_bool), Field(ge=1, le=10_000)]
Port = Annotated[int, BeforeValidator(not_bool), Field(ge=1, le=65_535)]
Seconds = Annotated[float, BeforeValidator(not_bool), Field(ge=0, le=_MONTH_S, allow_inf_nan=False)]
SomeSeconds = Annotated[float, BeforeValidator(not_bool), Field(gt=0, le=_MONTH_S, allow_inf_nan=False)]
ProbeSeconds = Annotated[float, BeforeValidator(not_bool), Field(ge=0.1, le=_MONTH_S, allow_inf_nan=False)]
WindowSeconds = Annotated[float, BeforeValidator(not_bool), Field(ge=1, le=600, allow_inf_nan=False)]
AboveZero = Annotated[float, BeforeValidator(not_bool), Field(gt=0, le=1e9, allow_inf_nan=False)]
Money = Annotated[float, BeforeValidator(not_bool), Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(not_bool), Field(gt=0, le=1, allow_inf_nan=False)]
Fraction = Annotated[float, BeforeValidator(not_bool), Field(ge=0, le=10, allow_inf_nan=False)]
PriceCap = Annotated[float, BeforeValidator(not_bool), Field(ge=1, le=1000, allow_inf_nan=False)]
Availability = Annotated[float, BeforeValidator(not_bool), Field(ge=0.5, le=0.9999, allow_inf_nan=False)]
Text = Annotated[str, BeforeValidator(_as_text), Field(min_length=1, max_length=MAX_BYTES)]
TeamName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
AnyText = Annotated[str, BeforeValidator(_as_text), Field(max_length=MAX_BYTES)]


def one_of(*names: str) -> Callable[[object], str]:
    """Return a parser for one of these words, written in any case."""

    def parse(value: object) -> str:
        word = value.lower() if isinstance(value, str) else None
        if word not in names:
            hint = did_you_mean(value, names) if isinstance(value, str) else None
            raise refuse(f"must be one of {', '.join(names)}", value, hint=hint)
        return word

    return parse


_parse_routing = one_of(*NAMES)


def _routing(value: object) -> str:
    """Parse the name of a routing policy; of one that earlier releases had, say what to write instead."""
    word = value.lower() if isinstance(value, str) else ""
    if word in RETIRED:
        raise refuse(f"{word} is no longer a policy: write {RETIRED[word]}")
    return _parse_routing(value)


def _word(*names: str) -> Any:
    return WithJsonSchema({"type": "string", "enum": list(names)})


_PLACERS = (
    "auto",
    "dynamic_fallback",
    "risk_hedge",
    "spothedge_literal",
    "even_spread",
    "round_robin",
    "single_zone",
    "single_region",
    "asg",
    "spread",
)
_DISK_TIERS = ("low", "medium", "high", "ultra", "best")
_NETWORK_TIERS = ("standard", "best")
_AUTOSCALERS = ("predictive", "reactive", "forecast_only")
_UPDATE_MODES = ("rolling", "blue_green")
_MOUNT_MODES = ("copy", "mount", "mount_cached")
LbPolicy = Annotated[str, PlainValidator(_routing), _word(*NAMES)]
SpotPlacer = Annotated[str, PlainValidator(one_of(*_PLACERS)), _word(*_PLACERS)]
DiskTier = Annotated[str, PlainValidator(one_of(*_DISK_TIERS)), _word(*_DISK_TIERS)]
NetworkTier = Annotated[str, PlainValidator(one_of(*_NETWORK_TIERS)), _word(*_NETWORK_TIERS)]
Autoscaler = Annotated[str, PlainValidator(one_of(*_AUTOSCALERS)), _word(*_AUTOSCALERS)]
LateRequests = Annotated[str, PlainValidator(one_of("queue", "shed")), _word("queue", "shed")]
UpdateMode = Annotated[str, PlainValidator(one_of(*_UPDATE_MODES)), _word(*_UPDATE_MODES)]
MountMode = Annotated[str, PlainValidator(one_of(*_MOUNT_MODES)), WithJsonSchema(
    {"type": "string", "enum": [*_MOUNT_MODES, *(mode.upper() for mode in _MOUNT_MODES)]}
)]  # fmt: skip


# --- shares and times ----------------------------------------------------------------------------------------

_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)\s*([smhd]?)", re.IGNORECASE)
_UNIT_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST_ENTRY_S = 7 * 86400.0


def parse_attainment(value: object) -> float:
    """``99.5%``, ``99.5`` or ``0.995`` -> the share."""
    text = str(value).strip() if isinstance(value, int | float | str) and not isinstance(value, bool) else ""
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        raise refuse("must be a share like 99.5%", value) from None
    share = number / 100.0 if text.endswith("%") or number > 1.0 else number
    if not 0.5 <= share <= 0.9999:
        raise refuse("must be a share from 50% to 99.99%", value)
    return round(share, 9)


def parse_duration(value: object) -> float:
    """``90``, ``90s``, ``30m``, ``10h`` or ``2d`` -> seconds."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds: float | None = float(value)
    else:
        match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
        seconds = None if match is None else float(match[1]) * _UNIT_S[match[2].lower()]
    if seconds is None or not 60.0 <= seconds <= _LONGEST_ENTRY_S:
        raise refuse("must be a duration from 1m to 7d, such as 10h", value)
    return seconds


def parse_cron(value: object) -> str:
    """Return five fields, as `cronsim` understands them."""
    from cronsim import CronSim, CronSimError

    if not isinstance(value, str) or len(value.split()) != 5:
        raise refuse('must be five fields like "0 8 * * 1-5"', value)
    try:
        next(CronSim(value, _EPOCH))
    except CronSimError as error:
        raise refuse(f"is no cron expression: {error}", value) from None
    except StopIteration:
        raise refuse("names no instant: that day never comes", value) from None
    return " ".join(value.split())


def parse_timezone(value: object) -> str:
    try:
        return ZoneInfo(str(value)).key
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise refuse("is no time zone, such as Europe/Berlin", value) from None


_SHARE = WithJsonSchema({"type": ["number", "string"]})
Attainment = Annotated[float, PlainValidator(parse_attainment), _SHARE]
Duration = Annotated[float, PlainValidator(parse_duration), _SHARE]
CronText = Annotated[str, PlainValidator(parse_cron), WithJsonSchema({"type": "string"})]
TimeZone = Annotated[str, PlainValidator(parse_timezone), WithJsonSchema({"type": "string"})]


# --- ports ---------------------------------------------------------------------------------------------------


def parse_ports(value: object) -> tuple[int, ...]:
    """``8080``, ``"8080"``, ``"8000-8010"`` or a list of these -> the ports, ascending, without repeats."""
    items = value if isinstance(value, list) else [value]
    ports: set[int] = set()
    for index, item in enumerate(items):
        ports.update(_port_range(item, (index,) if isinstance(value, list) else ()))
        if len(ports) > _MAX_PORTS:
            raise refuse(f"opens more than {_MAX_PORTS} ports", value)
    return tuple(sorted(ports))


def _port_range(value: object, at: tuple[str | int, ...]) -> Iterable[int]:
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", text)
    if match is None:
        raise refuse('must be a port or a range like "8000-8010"', value, at=at)
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last <= 65_535:
        raise refuse("must lie between 1 and 65535, the lower end first", value, at=at)
    return range(first, last + 1)


_ONE_PORT = {"type": ["integer", "string"]}
PortsValue = Annotated[
    tuple[int, ...],
    PlainValidator(parse_ports),
    WithJsonSchema({"anyOf": [_ONE_PORT, {"type": "array", "items": _ONE_PORT}]}),
]


# --- sizes and images ----------------------------------------------------------------------------------------


def parse_cpus(value: object) -> str:
    """``4``, ``0.5`` or ``4+``."""
    text = _as_text(value)
    if not isinstance(text, str) or not _CPUS.fullmatch(text):
        raise refuse("must look like 4 or 4+", value)
    return text


def parse_memory(value: object) -> str:
    """``16``, ``16+``, ``16GB``, ``16Gi+``, ``1TB`` -> GB, with the plus: ``16``, ``16+``, ``16``, ``16+``, ``1024``.

    The ``4x`` SkyPilot allows (GB for each virtual CPU) stays as it is.
    """
    size_gb, suffix = _gigabytes(value)
    if size_gb is None:
        raise refuse("must look like 16, 16+ or 16GB", value)
    return f"{size_gb:.9f}".rstrip("0").rstrip(".") + suffix


def parse_disk_size(value: object) -> int:
    """``512``, ``512GB``, ``512Gi`` or ``1TB`` -> GB."""
    size_gb, suffix = _gigabytes(value)
    if size_gb is None or suffix or not size_gb.is_integer() or not 1 <= size_gb <= 10_000_000:
        raise refuse("must be a whole size in GB like 512, or 1TB", value)
    return int(size_gb)


def _gigabytes(value: object) -> tuple[float | None, str]:
    """Return the size, None if it is none, and what stands behind it (``+`` or ``x``)."""
    text = _as_text(value)
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None, ""
    return float(match[1]) * _GB[(match[2] or "g")[0].lower()], match[3].lower()


_NUMBER_OR_TEXT = WithJsonSchema({"type": ["number", "string"]})
Cpus = Annotated[str, PlainValidator(parse_cpus), _NUMBER_OR_TEXT]
Memory = Annotated[str, PlainValidator(parse_memory), _NUMBER_OR_TEXT]
DiskSize = Annotated[int, PlainValidator(parse_disk_size), _NUMBER_OR_TEXT]


def parse_image(value: object) -> Pairs:
    """Return an image for all regions, or a mapping region -> image; ``{docker: X}`` is ``docker:X``."""
    if isinstance(value, str) and value:
        return (("*", value),)
    if (
        isinstance(value, dict)
        and value
        and all(isinstance(image, str) and image for image in value.values())
    ):
        if set(value) == {"docker"}:
            return (("*", f"docker:{value['docker']}"),)
        return tuple(value.items())
    raise refuse('must be an image like "docker:vllm/vllm-openai", or a mapping from region to image', value)


ImageValue = Annotated[
    Pairs,
    PlainValidator(parse_image),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "object", "additionalProperties": {"type": "string"}}]}
    ),
]


def parse_sources(value: object) -> tuple[str, ...]:
    """Return one local path or URL, or several."""
    items = value if isinstance(value, list) else [value]
    for index, item in enumerate(items):
        if not isinstance(item, str) or not item:
            raise refuse("must be a path or a URL", item, at=(index,) if isinstance(value, list) else ())
    return tuple(items)


Sources = Annotated[
    tuple[str, ...],
    PlainValidator(parse_sources),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


# --- the probe -----------------------------------------------------------------------------------------------


def parse_probe_path(value: object) -> str:
    if not isinstance(value, str) or not value.startswith("/"):
        raise refuse("must be a path that starts with a slash", value)
    if not value.isprintable() or " " in value:
        raise refuse("must not hold spaces or control characters", value)
    return value


ProbePath = Annotated[
    str, PlainValidator(parse_probe_path), WithJsonSchema({"type": "string", "pattern": r"^[/$]"})
]


def parse_post_data(value: object) -> str:
    """Return a mapping or the text of a JSON document -> JSON text."""
    try:
        document = json.loads(value, parse_constant=_no_constant) if isinstance(value, str) else value
        if isinstance(value, str | dict):
            return json.dumps(document, allow_nan=False)
    except RecursionError:
        raise refuse("is nested too deeply", value) from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise refuse(f"is not valid JSON: {error.msg} at {place}", value) from None
    except ValueError as error:
        raise refuse(f"is not valid JSON: {error}", value) from None
    raise refuse("must be a mapping or the text of a JSON document", value)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


PostData = Annotated[str, PlainValidator(parse_post_data), WithJsonSchema({"type": ["string", "object"]})]


def parse_pod(value: object) -> str:
    """Return a patch over the Pod of a replica -> JSON text."""
    from provisioners.kubernetes.pod_rules import problems

    text = parse_post_data(value)
    for problem in problems(json.loads(text)):
        raise refuse(problem.message, at=problem.at)
    return text


PodPatch = Annotated[str, PlainValidator(parse_pod), WithJsonSchema({"type": "object"})]


def parse_headers(value: object) -> Pairs:
    """Return a mapping from header name to text. Values are not quoted in errors: they are often credentials."""
    if not isinstance(value, dict):
        raise refuse("must be a mapping from header to text")
    pairs = []
    for name, raw in value.items():
        text = _as_text(raw)
        if not _HEADER.fullmatch(name):
            raise refuse("is not a header name", name, at=(name,))
        if not isinstance(text, str) or not (text.isprintable() and text.isascii()):
            raise refuse("must be one line of printable ASCII", at=(name,))
        pairs.append((name, text))
    return tuple(pairs)


Headers = Annotated[
    Pairs,
    PlainValidator(parse_headers),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": ["string", "number"]}}),
]
