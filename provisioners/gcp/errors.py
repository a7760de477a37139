"""What Compute Engine's errors mean for the next decision.

The table of `error_codes`, then the HTTP status of what no row knows; what has none is worth another try. Pure.
"""

from __future__ import annotations

import re

from policies.model import CapacityType, Zone
from provisioners.gcp.error_codes import BY_STATUS, TABLE, THROTTLED, UNKNOWN
from provisioners.port.error_codes import ErrorCode
from provisioners.port.errors import ProvisionError, error_for

CLOUD = "gcp"
ALREADY_EXISTS = "alreadyExists"

QUOTA_RETRY_S = 1800.0  # a person has to request more, or to give something back
THROTTLED_RETRY_S = 15.0
RETRY_S = 3.0


def outcome_of(code: str, status: int, message: str, capacity_type: CapacityType) -> ErrorCode:
    """Return what to do next, and the sentence which says so; still with the names of its blanks."""
    found = TABLE.find(code, message, capacity_type)
    if found is not None:
        return found
    return next((row for statuses, row in BY_STATUS if status in statuses), UNKNOWN)


def error_of(
    code: str,
    status: int,
    message: str,
    *,
    capacity_type: CapacityType = CapacityType.ON_DEMAND,
    zone: Zone | None = None,
    now: float,
    retry_after_s: float | None = None,
    operation: str = "",
) -> ProvisionError:
    """Return the error to raise.

    `retry_after_s` is what the response requested, if it did. `operation` is the name of the one that failed after it was
    accepted, by which Google finds it.
    """
    row = outcome_of(code, status, message, capacity_type)
    sentence = message.strip().rstrip(".")
    said = row.advice.format(
        message=f"{sentence}; {operation}" if operation else sentence,
        market=capacity_type.value.replace("_", "-"),
        quota=_quota(message),
        region=_region(message, zone),
        permission=_permission(message),
        constraint=_constraint(message),
    )
    usual_s = THROTTLED_RETRY_S if row.advice is THROTTLED else RETRY_S
    return error_for(
        row.kind,
        f"{zone.name}: {said}" if zone is not None else said,
        cloud=CLOUD,
        code=code,
        zone=zone,
        scope=row.scope,
        closed_region=zone.region if row.closes_region and zone is not None else None,
        retry_at=now + QUOTA_RETRY_S,
        retry_after_s=usual_s if retry_after_s is None else retry_after_s,
    )


def _constraint(message: str) -> str:
    found = re.search(r"constraints?/([\w.]+)", message)
    return found[1] if found else "named here"


def _quota(message: str) -> str:
    found = re.search(r"quota '?([A-Z][A-Z0-9_]+)'?", message, re.IGNORECASE)
    return found[1] if found else "of the project"


def _region(message: str, zone: Zone | None) -> str:
    found = re.search(r"in region ([a-z0-9-]+)", message)
    return found[1] if found else zone.region if zone is not None else "that region"


def _permission(message: str) -> str:
    found = re.search(
        r"'?([a-z][\w.-]*\.[a-z]\w*\.[a-zA-Z]+)'? permission|permission '?([\w.]+)'?", message, re.IGNORECASE
    )
    return (found[1] or found[2]) if found else "which is missing"
