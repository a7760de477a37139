"""EC2's description of an instance as a `Machine`. Pure.

Sources: "Instance lifecycle" and "Spot request status codes" of the EC2 user guide. A spot instance that is set to
terminate gets its final status code two minutes before it dies: as long as it lives, that code is its notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from policies.model import CapacityType, Zone
from provisioners.aws.errors import CLOUD
from provisioners.aws.outcomes import AT_BIRTH
from provisioners.errors import Refusal
from provisioners.machines import (
    NODES_TAG,
    OWNER_TAG,
    RANK_TAG,
    REPLICA_TAG,
    SERVICE_TAG,
    TOKEN_TAG,
    Machine,
    MachineOrder,
    MachineState,
)

SPOT_NOTICE_S = 120.0
NOTICE_CODES = (
    "marked-for-termination",
    "instance-terminated-by-price",
    "instance-terminated-capacity-oversubscribed",
    "instance-terminated-no-capacity",
)

_STATES: Mapping[str, MachineState] = MappingProxyType(
    {
        "pending": MachineState.PENDING,
        "running": MachineState.RUNNING,
        "shutting-down": MachineState.STOPPING,
        "stopping": MachineState.STOPPING,
        "stopped": MachineState.FAILED,  # no use any more, and its disk is still billed
        "terminated": MachineState.TERMINATED,
    }
)
_PREEMPTIONS = ("Server.SpotInstanceTermination", "Server.SpotInstanceShutdown")
_ASKED_FOR = "Client.UserInitiatedShutdown"


def machine_of(
    described: Mapping[str, Any],
    region: str,
    zone_ids: Mapping[str, str],
    *,
    use_private_ip: bool,
    preempt_at: float | None = None,
) -> Machine:
    """`zone_ids` are the region's, by the account's zone names. Tags that are missing (somebody else removed them) leave
    a machine that can still be seen and destroyed."""
    tags = tags_of(described)
    zone_name = described.get("Placement", {}).get("AvailabilityZone", "")
    private_address = described.get("PrivateIpAddress")
    state, message = state_of(described)
    refusal = refusal_of(described, state)
    launched = described.get("LaunchTime")
    return Machine(
        id=described["InstanceId"],
        token=tags.get(TOKEN_TAG, ""),
        owner=tags.get(OWNER_TAG, ""),
        service=tags.get(SERVICE_TAG, ""),
        replica_id=_number(tags.get(REPLICA_TAG), 0),
        rank=_number(tags.get(RANK_TAG), 0),
        num_nodes=_number(tags.get(NODES_TAG), 1),
        zone=Zone(CLOUD, region, zone_ids.get(zone_name, zone_name)),
        capacity_type=(
            CapacityType.SPOT if described.get("InstanceLifecycle") == "spot" else CapacityType.ON_DEMAND
        ),
        state=state,
        address=private_address if use_private_ip else described.get("PublicIpAddress"),
        private_address=private_address,
        launched_at=None if launched is None else launched.timestamp(),
        preempt_at=preempt_at if state in (MachineState.PENDING, MachineState.RUNNING) else None,
        message=message,
        instance_type=described.get("InstanceType", ""),
        refusal=refusal,
    )


def state_of(described: Mapping[str, Any]) -> tuple[MachineState, str]:
    """The state, and a sentence about its end unless it was asked for."""
    state = _STATES.get(described["State"]["Name"], MachineState.FAILED)
    if state in (MachineState.PENDING, MachineState.RUNNING):
        return state, ""
    reason = described.get("StateReason") or {}
    code = reason.get("Code", "")
    if code in _PREEMPTIONS:
        over = state is MachineState.TERMINATED
        return MachineState.PREEMPTED if over else state, f"EC2 took the spot instance back ({code})"
    if state is MachineState.FAILED:
        return state, f"it is {described['State']['Name']}, and its disk is still billed"
    if code in ("", _ASKED_FOR):
        return state, ""
    said = str(reason.get("Message") or code)
    known = AT_BIRTH.find(code, "", None)
    return state, said if known is None else f"{known.advice} ({said})"


def refusal_of(described: Mapping[str, Any], state: MachineState) -> Refusal | None:
    """What the end of an instance that EC2 had accepted means, where the reason is one of a launch."""
    code = (described.get("StateReason") or {}).get("Code", "")
    known = AT_BIRTH.find(code, "", None)
    if known is None or state in (MachineState.PENDING, MachineState.RUNNING):
        return None
    return Refusal(known.kind, known.scope)


def tags_of(described: Mapping[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in described.get("Tags", ())}


def forgotten(order: MachineOrder) -> Machine:
    """What is left to say of a machine that EC2 remembers by its client token alone."""
    return Machine(
        id=order.token,
        token=order.token,
        owner=order.owner,
        service=order.service,
        replica_id=order.replica_id,
        rank=order.rank,
        num_nodes=order.num_nodes,
        zone=order.zone,
        capacity_type=order.capacity_type,
        state=MachineState.TERMINATED,
        message="it was terminated so long ago that EC2 no longer lists it",
    )


def _number(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdecimal() else default
