"""A replica of several nodes as one instance: it is launched whole, and terminated whole.

The first line that fits is the state of the instance:

    every node is gone                      PREEMPTED if the cloud took one, else TERMINATED
    every node that is left is STOPPING     STOPPING
    a node is gone, or STOPPING             BROKEN
    a node is BROKEN                        BROKEN
    a node's `setup` failed                 SETUP_FAILED
    a node's `run` exited                   RUN_EXITED
    no supervisor for a node                UNSUPERVISED
    otherwise                               what the node that is least far is: PENDING, SETUP, RUNNING

A lost node comes before a failed script because it explains it: a program that loses its peer exits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from provisioners.port.base import Instance, InstanceState
from provisioners.port.errors import TransientError
from provisioners.port.lease import Lease

A = TypeVar("A")
B = TypeVar("B")
_S = InstanceState

_FIRST_THAT_FITS = (_S.SETUP_FAILED, _S.RUN_EXITED, _S.UNSUPERVISED, _S.PENDING, _S.SETUP, _S.RUNNING)


def instance_of_nodes(nodes: Sequence[Instance]) -> Instance:
    """Return the nodes of one replica (by rank, the head first) as the one instance they make.

    It is the head with the state of the replica, the first refusal of any node, the lease that ends first, the earliest preemption notice that stands for any node, and the
    message of the first node that has one to give for this state, which it names.
    """
    head = nodes[0]
    if len(nodes) == 1:
        return head
    state = state_of_nodes([node.state for node in nodes])
    notices = [node.preempt_at for node in nodes if node.preempt_at is not None and not state.is_gone]
    refusal = next((node.refusal for node in nodes if node.refusal is not None), None)
    return replace(
        head,
        state=state,
        preempt_at=min(notices, default=None),
        retire_at=_first_to_retire(nodes),
        message=_message(state, nodes),
        refusal=refusal,
        lease=_first_to_end(nodes),
    )


def _first_to_retire(nodes: Sequence[Instance]) -> float | None:
    """Return nothing is known to be announced only if that is so of all of them."""
    known = [node.retire_at for node in nodes]
    announced = [at for at in known if at]
    return min(announced) if announced else (None if None in known else 0.0)


def state_of_nodes(states: Sequence[InstanceState]) -> InstanceState:
    """Return what a replica of several nodes is whose nodes are in these states."""
    left = {state for state in states if not state.is_gone}
    if not left:
        return _S.PREEMPTED if _S.PREEMPTED in states else _S.TERMINATED
    if left == {_S.STOPPING}:
        return _S.STOPPING
    if _S.BROKEN in left or any(_is_lost(state) for state in states):
        return _S.BROKEN
    return next(state for state in _FIRST_THAT_FITS if state in left)


def who_is_lost(ranks: Sequence[int], num_nodes: int) -> str:
    """Return the message of a broken replica."""
    nodes, are = ("node", "is") if len(ranks) == 1 else ("nodes", "are")
    return f"{nodes} {', '.join(map(str, ranks))} of {num_nodes} {are} gone"


def _first_to_end(nodes: Sequence[Instance]) -> Lease | None:
    """Of the leases of the nodes; one that is being renewed ends last."""
    leases = [node.lease for node in nodes if node.lease is not None]
    return min(
        leases,
        key=lambda one: one.lease_s + (float("inf") if one.visited_at is None else one.visited_at),
        default=None,
    )


def _is_lost(state: InstanceState) -> bool:
    return state.is_gone or state is _S.STOPPING


def _message(state: InstanceState, nodes: Sequence[Instance]) -> str:
    lost = [rank for rank, node in enumerate(nodes) if _is_lost(node.state)]
    if state is _S.BROKEN and lost:
        said = next((nodes[rank].message for rank in lost if nodes[rank].message), "")
        return who_is_lost(lost, len(nodes)) + (f": {said}" if said else "")
    messages = (
        (rank, node.message) for rank, node in enumerate(nodes) if node.state is state and node.message
    )
    return next((f"node {rank}: {message}" for rank, message in messages), "")


def for_each(at_once: int, call: Callable[[A], B], arguments: Sequence[A]) -> list[B]:
    """`call` for each, side by side; once all are over, the first error that is not transient, or the first."""
    if len(arguments) == 1:
        return [call(arguments[0])]
    if not arguments:
        return []
    with ThreadPoolExecutor(min(at_once, len(arguments)), thread_name_prefix="machines") as pool:
        futures = [pool.submit(call, argument) for argument in arguments]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        raise next((one for one in errors if not isinstance(one, TransientError)), errors[0])
    return [future.result() for future in futures]
