"""The machines of a replica as a listing shows them: grouped by replica, and one state from the cloud's and the host's. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from provisioners.port.base import Instance, InstanceState
from provisioners.port.host_port import HostReport
from provisioners.port.vm import Machine, MachineState, replica_token


def state_of(machine: Machine, report: HostReport | None, awaited: bool) -> tuple[InstanceState, str]:
    """Return one state from what the cloud and the machine report. `awaited`: a launch of this process will set it up."""
    match machine.state:
        case MachineState.PENDING:
            return InstanceState.PENDING, machine.message
        case MachineState.STOPPING:
            return InstanceState.STOPPING, machine.message
        case MachineState.PREEMPTED:
            return InstanceState.PREEMPTED, machine.message
        case MachineState.TERMINATED:
            return InstanceState.TERMINATED, machine.message
        case MachineState.FAILED:
            return (
                InstanceState.BROKEN,
                machine.message or "the cloud accepted it and then failed to start it",
            )
        case MachineState.RUNNING:
            if report is not None:
                return report.state, report.message
            return (InstanceState.PENDING if awaited else InstanceState.UNSUPERVISED), machine.message


def by_replica(machines: Iterable[Machine]) -> dict[str, tuple[Machine, ...]]:
    """Return the machines of each replica by rank, under its token.

    Of several of one rank (one that terminated, and the one that replaced it) it is the live one.
    """
    groups: dict[str, dict[int, Machine]] = {}
    for machine in machines:
        token = replica_token(machine)
        ranks = groups.setdefault(token, {})
        known = ranks.get(machine.rank)
        if known is None or known.state.is_gone:
            ranks[machine.rank] = machine
    return {token: tuple(sorted(ranks.values(), key=rank_of)) for token, ranks in groups.items()}


def head_of(instance: Instance) -> Machine:
    """Return the head machine, as far as it is known from the instance alone."""
    return Machine(
        id=instance.id,
        token=instance.token,
        owner=instance.owner,
        service=instance.service,
        replica_id=instance.replica_id,
        rank=0,
        num_nodes=1,
        zone=instance.zone,
        capacity_type=instance.capacity_type,
        state=MachineState.PENDING,
    )


def is_lost(machine: Machine) -> bool:
    return machine.state.is_gone or machine.state in (MachineState.STOPPING, MachineState.FAILED)


def rank_of(machine: Machine) -> int:
    return machine.rank
