"""The section `teams` of `config.yaml`: what the services of each team may use together, and what its operators may choose."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, PlainValidator

from policies.goals import Quota
from skyserve_cli.config_section import Strict

TeamName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Pattern = Annotated[str, Field(min_length=1, max_length=500)]


def _ports(value: object) -> tuple[int, int]:
    """``8000`` or ``8000-8010`` -> the first and the last one."""
    found = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", str(value))
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last <= 65_535:
        raise ValueError(f"{str(value)[:40]!r} is neither a port nor a range like 8000-8010")
    return first, last


PodPrivilege = Literal[
    "hostPath", "privileged", "hostNetwork", "hostPID", "hostIPC", "serviceAccountName", "secrets", "cache"
]
PortRange = Annotated[tuple[int, int], PlainValidator(_ports)]


class TeamConfig(Strict):
    max_gpus: int | None = Field(
        default=None, ge=0, description="accelerators of all replicas together. null: no limit"
    )
    max_replicas: int | None = Field(default=None, ge=0, description="replicas together. null: no limit")
    max_usd_hour: float | None = Field(
        default=None,
        gt=0,
        description="what the machines of all services may cost together, USD per hour. null: no limit",
    )
    max_usd_month: float | None = Field(
        default=None,
        gt=0,
        description="when the machines have cost this many USD in a calendar month (UTC), no replica is launched until the next. "
        "null: no limit",
    )

    clouds: tuple[Pattern, ...] | None = Field(
        default=None,
        description="where operators may run its services: CLOUD or CLOUD/REGION, with * for any text; the regions of ssh are "
        "pools, those of kubernetes contexts. null: anywhere",
    )
    images: tuple[Pattern, ...] | None = Field(
        default=None,
        description="images that operators may name, such as docker:vllm/*, with * for any text. null: any",
    )
    ports: tuple[PortRange, ...] | None = Field(
        default=None,
        description="ports that operators may choose for load balancers: numbers, or ranges like 8000-8010. null: any, on the "
        "controller's host from 1024 on",
    )
    hosts: tuple[Pattern, ...] | None = Field(
        default=None,
        description="addresses of the controller's host that operators may choose for load balancers. null: any",
    )

    pod: tuple[PodPrivilege, ...] = Field(
        default=(),
        description="what operators may set in `kubernetes.pod` beyond the Pod itself: hostPath (and other volumes but claims), "
        "privileged, hostNetwork, hostPID, hostIPC, serviceAccountName, secrets; and cache, for `cache: node` in Kubernetes. Default: none of these",
    )

    @property
    def quota(self) -> Quota:
        return Quota(self.max_gpus, self.max_replicas, self.max_usd_hour, self.max_usd_month)
