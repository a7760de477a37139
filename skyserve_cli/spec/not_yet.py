"""What a file may say although nothing acts on it yet. A user is told, by path; nothing is dropped in silence.

A feature that arrives deletes its row.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from skyserve_cli.spec.problems import Loc, SpecWarning, dotted


def _given(value: object) -> bool:
    return value not in (None, False, 0, {}, [])


@dataclass(frozen=True, slots=True)
class NotYet:
    """`path` is dotted, without the indices of any_of and ordered. `meanwhile` says what happens instead."""

    path: str
    meanwhile: str
    applies: Callable[[object], bool] = _given


def _is_git(value: object) -> bool:
    return isinstance(value, dict) and "url" in value


_SKYPILOT_ONLY = "it is a setting of SkyPilot's own machinery"

NOT_YET: tuple[NotYet, ...] = (
    NotYet("resources.instance_type", "any instance type with the accelerator is taken"),
    NotYet("resources.cpus", "offers are not filtered by it"),
    NotYet("resources.memory", "offers are not filtered by it"),
    NotYet("resources.disk_size", "the cloud's default disk is used"),
    NotYet("resources.disk_tier", "the cloud's default disk is used"),
    NotYet("resources.network_tier", "the cloud's default network is used"),
    NotYet("resources.local_disk", "offers are not filtered by it"),
    NotYet("resources.image_id", "setup and run start in the default image"),
    NotYet("resources.labels", "instances do not carry them"),
    NotYet("resources.max_hourly_cost", "offers are not filtered by it"),
    NotYet("resources.accelerator_args", "the cloud's defaults are used"),
    NotYet("resources.volumes", "no volume is attached"),
    NotYet("resources.autostop", "a service ends with `serve down`"),
    NotYet("resources.priority", _SKYPILOT_ONLY),
    NotYet("resources.priority_class", _SKYPILOT_ONLY),
    NotYet("workdir", "a git repository is not checked out; clone it in setup", _is_git),
    NotYet("file_mounts", "nothing is mounted or copied; fetch the files in setup"),
    NotYet("volumes", "no volume is mounted"),
    NotYet("managed_secrets", "replicas do not get them; name them in secrets"),
    NotYet("config", _SKYPILOT_ONLY),
    NotYet("event_callback", "no script is run; see `serve events`"),
    NotYet("inputs", _SKYPILOT_ONLY),
    NotYet("outputs", _SKYPILOT_ONLY),
    NotYet("api_server_access", _SKYPILOT_ONLY),
)


def not_yet_warnings(tree: Mapping[str, Any]) -> list[SpecWarning]:
    """One warning for each thing in the file that nothing acts on."""
    rows = {row.path: row for row in NOT_YET}
    warnings = []
    for loc, value in _walk(tree, ()):
        row = rows.get(_row_path(loc))
        if row is not None and row.applies(value):
            warnings.append(SpecWarning(dotted(loc), f"not acted on yet: {row.meanwhile}"))
    return warnings


def _row_path(loc: Loc) -> str:
    in_alternative = loc[0] == "resources" and len(loc) > 2 and loc[1] in ("any_of", "ordered")
    return dotted((loc[0], *loc[3:]) if in_alternative else loc)


def _walk(value: object, loc: Loc) -> Iterator[tuple[Loc, object]]:
    if loc:
        yield loc, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk(inner, (*loc, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _walk(inner, (*loc, index))
