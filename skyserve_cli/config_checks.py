"""Checks of single settings of `config.yaml`: a value as it is, or a ValueError whose sentence names the problem."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

_MOST_LABELS = 35  # clouds allow about 50 tags, of which some are ours

_GCP_NETWORK = re.compile(r"(projects/[a-z0-9.:-]+/global/networks/)?[a-z][a-z0-9-]*")
_GCP_SUBNETWORK = re.compile(r"projects/[a-z0-9.:-]+/regions/([a-z0-9-]+)/subnetworks/[a-z][a-z0-9-]*")


def like(pattern: str, example: str) -> Callable[[Any], Any]:
    """Return a check of a text, or of one for each region."""
    compiled = re.compile(pattern)

    def check(value: Any) -> Any:
        for one in value.values() if isinstance(value, Mapping) else (value,):
            if value is not None and not (isinstance(one, str) and compiled.fullmatch(one)):
                raise ValueError(f"{one!r} is not like {example}")
        return value

    return check


def subnets_of_aws(subnets: Any) -> Any:
    """Return one id, or a list of them, for each place."""
    if not isinstance(subnets, Mapping):
        raise ValueError("must be ids of subnets by zone id or region")
    found = {}
    for place, ids in subnets.items():
        listed = [ids] if isinstance(ids, str) else ids
        if not isinstance(listed, list | tuple) or not listed:
            raise ValueError(f"{place}: must be the id of a subnet, or a list of them")
        for one in listed:
            if not isinstance(one, str) or not re.fullmatch(r"subnet-[0-9a-f]+", one):
                raise ValueError(f"{place}: {one!r} is not like subnet-0123456789abcdef0")
        found[str(place)] = tuple(listed)
    return found


def names_of_reservations(reservations: Any) -> Any:
    """By names that can stand in a service file, and beside a zone."""
    for name in reservations if isinstance(reservations, Mapping) else ():
        if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", name) or name == "none":
            raise ValueError(
                f"{name!r} is no name: at most 31 lower-case letters, digits and hyphens, and not none"
            )
    return reservations


def with_time_zone(until: datetime | None) -> datetime | None:
    if until is not None and until.tzinfo is None:
        raise ValueError("has no time zone: write it like 2027-01-31T11:30:00Z")
    return until


def network_of_gcp(network: str | None) -> str | None:
    if network is not None and not _GCP_NETWORK.fullmatch(network):
        raise ValueError(f"{network!r} is not like NAME or projects/PROJECT/global/networks/NAME")
    return network


def subnets_of_gcp(subnets: dict[str, str]) -> dict[str, str]:
    for region, path in subnets.items():
        found = _GCP_SUBNETWORK.fullmatch(path)
        if found is None:
            raise ValueError(f"{path!r} is not like projects/PROJECT/regions/{region}/subnetworks/NAME")
        if found[1] != region:
            raise ValueError(f"{path} is in {found[1]}, not in {region}")
    return subnets


def os_login(value: Any) -> Any:
    if value not in (True, False, "auto"):
        raise ValueError(f"{value!r} is not one of auto, true and false")
    return value


def labels_of_gcp(labels: dict[str, str]) -> dict[str, str]:
    for key, value in labels.items():
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key) or not re.fullmatch(r"[a-z0-9_-]{0,63}", value):
            raise ValueError(
                f"{key}={value} is no label of Google Cloud: lower-case letters, digits, - and _, at most 63 of them, and a "
                "key begins with a letter"
            )
    return _few(labels)


def labels_of_aws(labels: dict[str, str]) -> dict[str, str]:
    return _tags(labels, 128, re.compile(r"(?i)aws:"))


def labels_of_azure(labels: dict[str, str]) -> dict[str, str]:
    return _tags(labels, 512, re.compile(r".*[<>%&\\?/]"))


def _tags(labels: dict[str, str], longest_key: int, wrong: re.Pattern[str]) -> dict[str, str]:
    for key, value in labels.items():
        if not 0 < len(key) <= longest_key or len(value) > 256 or wrong.match(key):
            raise ValueError(f"{key}={value} cannot be a tag there")
    return _few(labels)


def _few(labels: dict[str, str]) -> dict[str, str]:
    if len(labels) > _MOST_LABELS:
        raise ValueError(f"there are {len(labels)} labels, and at most {_MOST_LABELS} are possible")
    return labels
