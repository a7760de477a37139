"""The interface of a cloud that runs load balancer agents itself, instead of machines on which we run them.

An agent is an instance as any other: launched, listed and terminated by `base.Provisioner`, with the endpoint that clients use. What it
runs is a release, which the cloud puts in the place of the one before without a refused connection. While it does, there are two processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from provisioners.port.base import Instance


@dataclass(frozen=True, slots=True)
class AgentRelease:
    """What an agent should run: arguments of `python -m lb`, and files by the names by which the arguments call them.

    `ports` are those of the endpoint that clients and peers come to. Equal releases have equal names.
    """

    name: str
    arguments: tuple[str, ...]
    ports: tuple[int, ...]
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class AgentProcess:
    """One process of an agent. `admin` is the base URL of its admin port, None while it has none.

    `is_leaving`: it serves what it has, and nothing new. `trouble` is one sentence about what does not come up. `is_reachable`: new
    connections to the agent's address lead to it.
    """

    id: str
    release: str
    admin: str | None = None
    is_leaving: bool = False
    trouble: str = ""
    is_reachable: bool = True


@runtime_checkable
class AgentSource(Protocol):
    """A provisioner that runs load balancer agents itself."""

    def agent_version(self) -> str:
        """Return what the processes are made of, for people."""
        ...

    def run_agent(self, instance: Instance, release: AgentRelease) -> Sequence[AgentProcess]:
        """Have the release run, and return the processes that there are, the oldest first.

        To be called over and over; calls the cloud only if something is to be changed. Raises ProvisionError.
        """
        ...
