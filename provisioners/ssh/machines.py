"""The user's own hosts as a cloud: a machine is a claim on some GPUs of one of them.

Nothing is booted and user data is not run. Claims are files of the host (`host_agent.claims`), so they are there whichever controller
fails, and several controllers see each other's.

*A host that does not respond* is not empty. What it was last seen to have, by this controller or the one before it
(`host_cache`), is listed again, as running, with a sentence; where nothing is remembered there is no list at all but an error,
because every list that lacks a machine says that the machine is gone. Who has lost a host for good takes it out of
config.yaml.

*A host that cannot be used* is a zone without room: it does not respond, has another key than the one in known_hosts
(then nothing is sent to it), refuses the login, or its disk is full. Another one may be usable, now; and this one is
tried again after a while, so that the only thing to do is to fix it. It is listed like one that is silent.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock
from typing import Any, ClassVar, TypeVar

from policies.model import CapacityType, Zone
from provisioners.clock import unix_now
from provisioners.port.base import Cache
from provisioners.port.commands import (
    Commands,
    DiskFullError,
    HostKeyError,
    Login,
    LoginRefusedError,
    ShellError,
    UnreachableError,
)
from provisioners.port.errors import (
    AuthError,
    CapacityError,
    InvalidRequestError,
    ProvisionError,
    TransientError,
)
from provisioners.port.firewall import FirewallAccess
from provisioners.port.regions import ClosedRegions
from provisioners.port.vm import (
    CAPACITY_TAG,
    NODES_TAG,
    OWNER_TAG,
    RANK_TAG,
    REPLICA_TAG,
    SERVICE_TAG,
    Finding,
    Level,
    Machine,
    MachineOrder,
    MachineState,
    OrphanedResource,
    Silent,
)
from provisioners.remote.async_ssh import connect_commands
from provisioners.remote.bootstrap_steps import ROOT, cache_folder
from provisioners.remote.host import Host
from provisioners.remote.ssh_config import has_authorities
from provisioners.ssh.host_cache import SeenClaims
from provisioners.ssh.pool import CLOUD, HostPools, PoolHost, has_gpus

STOP_GRACE_S = 10.0
_STOP_TIMEOUT_S = 60.0
_AT_ONCE = 16
_FREE_GB = 5.0

T = TypeVar("T")


class SshMachines:
    """`Machines` over the pools. Keeps a connection to each host. `seen` remembers what hosts had."""

    name: ClassVar[str] = CLOUD

    def __init__(
        self,
        pools: HostPools,
        dial: Callable[[Login], Commands] = connect_commands,
        seen: SeenClaims | None = None,
    ) -> None:
        self._pools = pools
        self._dial = dial
        self._shells: dict[str, Commands] = {}
        self._dialling: dict[str, Lock] = {}
        self._unanswered: set[str] = set()  # tokens of claims that were requested
        self._seen = seen or SeenClaims()
        self.closed = ClosedRegions(unix_now)  # never any: the hosts are the user's own
        self._lock = Lock()

    def create(self, order: MachineOrder) -> Machine:
        hosts = self._pools.in_zone(order.zone)
        if not hosts:
            raise InvalidRequestError(
                f"no host of config.yaml is in {order.zone}", cloud=CLOUD, zone=order.zone
            )
        fitting = [one for one in hosts if has_gpus(one, order.accelerator, order.accelerator_count)]
        if not fitting:
            raise InvalidRequestError(
                f"no host in {order.zone} has {order.accelerator_count:g} {order.accelerator}; see config.yaml",
                cloud=CLOUD,
                zone=order.zone,
            )
        if len(fitting) > 1:
            # The order may have been sent before, and carried out on any of them. One host needs no such question.
            for host in fitting:
                if any(one.token == order.token for one in self._list_or_recall(host)):
                    fitting = [host]
        refusals = []
        for host in fitting:
            try:
                response = self._claim(host, order)
            except CapacityError as error:
                if len(fitting) == 1:
                    raise
                refusals.append(error.message)
                continue
            if "claim" in response:
                self._seen.add(host.name, response["claim"])
                return _machine(host, response["claim"])
            if "busy" in response:
                raise TransientError(f"{host.name}: its claims are locked", cloud=CLOUD, zone=order.zone)
            refusals.append(f"{host.name}: {response['refused']}")
        raise CapacityError(f"no room in {order.zone}: {'; '.join(refusals)}", cloud=CLOUD, zone=order.zone)

    def machines(self, owner: str, silent: Silent | None = None) -> Sequence[Machine]:
        lists = self._of_hosts(self._list_or_recall, silent)
        return [machine for found in lists for machine in found if machine.owner == owner]

    def destroy(self, machine: Machine) -> None:
        host = self._pools.host(machine.id.partition("/")[0])
        if host is None:
            return  # the user took it out of the pool
        grace = (machine.token, f"{STOP_GRACE_S:g}")
        response = self._call(host, "release", *grace, timeout_s=STOP_GRACE_S + _STOP_TIMEOUT_S)
        if "left" in response:
            raise TransientError(f"{host.name}: {response['left']} is left of {machine.token}", cloud=CLOUD)

    def spot_prices(
        self, regions: Sequence[str], instance_types: Collection[str] = (), silent: Silent | None = None
    ) -> Mapping[tuple[str, str], float]:
        return {}

    def orphans(self, owner: str, silent: Silent | None = None) -> Sequence[OrphanedResource]:
        """Folders of machines whose claim is over."""

        def of(host: PoolHost) -> Sequence[OrphanedResource]:
            try:
                known = self._call(host, "claims")["orphans"]
            except ProvisionError:
                if self._seen.has_met(host.name):
                    raise
                return ()  # it never saw our order
            orphans = [one["token"] for one in known if one["owner"] == owner]
            return [
                OrphanedResource("folder", f"{host.name}/{token}", host.pool, token, usd_month=0.0)
                for token in orphans
            ]

        return [orphan for found in self._of_hosts(of, silent) for orphan in found]

    def remove(self, orphan: OrphanedResource) -> None:
        name, _, token = orphan.id.partition("/")
        host = self._pools.host(name)
        if host is not None:
            self._call(host, "release", token, f"{STOP_GRACE_S:g}", timeout_s=STOP_GRACE_S + _STOP_TIMEOUT_S)

    def remove_cache(self, cache: Cache) -> tuple[list[str], list[str]]:
        """Return the hosts whose folder was removed, and why others could not be cleaned."""
        folder = shlex.quote(cache_folder(cache))
        script = f"[ -e {folder} ] || exit 0; rm -rf {folder} 2>/dev/null || sudo -n rm -rf {folder} && echo removed"

        def of(host: PoolHost) -> tuple[str, str]:
            try:
                said = self._shell(host).run(script).out
            except (ProvisionError, ShellError) as error:
                return "", f"{host.name}: {folder} is not removed: {error.message}"
            return (host.name if said else ""), ""

        hosts = [host for host in self._pools.hosts if self._seen.has_met(host.name)]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ssh-cache") as pool:
            found = list(pool.map(of, hosts))
        return [name for name, _ in found if name], [why for _, why in found if why]

    def shared(self, owner: str, silent: Silent | None = None) -> Sequence[OrphanedResource]:
        return ()

    def admit(self, owner: str, access: FirewallAccess) -> None:
        """The network between own hosts is their administrator's."""

    def delete_shared(self, owner: str) -> Sequence[str]:
        return ()  # nothing is shared by the owner's machines but the agent, which is others' too

    def check(self) -> Sequence[Finding]:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ssh-check") as pool:
            return list(pool.map(self._check, self._pools.hosts))

    def login(self, machine: Machine) -> Login:
        """Return how to get into the host that the machine is a part of. Raises AuthError."""
        host = self._pools.host(machine.id.partition("/")[0])
        if host is None:
            raise InvalidRequestError(f"{machine.id}: config.yaml has no such host any more", cloud=CLOUD)
        return login_of(host)

    # --- inside

    def _claim(self, host: PoolHost, order: MachineOrder) -> dict[str, Any]:
        """Raise CapacityError only if the host has not received the order, from this controller.

        A claim whose response was lost is requested until it is known.
        """
        is_new = order.token not in self._unanswered
        try:
            response = self._call(
                host, "claim", request=_request(order, host), zone=order.zone, is_offer=is_new
            )
        except TransientError:
            self._unanswered.add(order.token)
            self._seen.note(host.name, self._seen.of(host.name) or [])  # it may have received our order
            raise
        self._unanswered.discard(order.token)
        return response

    def _of_hosts(
        self, query: Callable[[PoolHost], Sequence[T]], silent: Silent | None
    ) -> Sequence[Sequence[T]]:
        """Return what each host reports.

        One that does not is an error, or is passed to `silent`; if none does, that is an error.
        """

        def response(host: PoolHost) -> Sequence[T] | ProvisionError:
            try:
                return query(host)
            except ProvisionError as error:
                if silent is None:
                    raise
                silent(host.place.name, error)
                return error

        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ssh-list") as pool:
            answers = list(pool.map(response, self._pools.hosts))
        errors = [one for one in answers if isinstance(one, ProvisionError)]
        if errors and len(errors) == len(answers):
            raise errors[0]
        return [one for one in answers if not isinstance(one, ProvisionError)]

    def _list_or_recall(self, host: PoolHost) -> Sequence[Machine]:
        try:
            return self._list(host, host.place)
        except ProvisionError as error:
            seen = self._seen.of(host.name)
            if seen is None and isinstance(error, AuthError):
                raise
            if seen is None:
                raise TransientError(
                    f"{error.message}; what runs there is not known, so nothing is listed until it answers or is "
                    "taken out of config.yaml",
                    cloud=CLOUD,
                    zone=host.place,
                    retry_after_s=5.0,
                ) from error
            machines = [_machine(host, claim) for claim in seen]
            return [one if one.state.is_gone else replace(one, message=error.message) for one in machines]

    def _list(self, host: PoolHost, zone: Zone) -> tuple[Machine, ...]:
        claims = self._call(host, "claims", zone=zone)["claims"]
        self._seen.note(host.name, claims)
        return tuple(_machine(host, claim) for claim in claims)

    def _call(
        self,
        host: PoolHost,
        verb: str,
        *words: str,
        request: Mapping[str, Any] | None = None,
        zone: Zone | None = None,
        is_offer: bool = False,
        timeout_s: float = 30.0,
    ) -> dict[str, Any]:
        """Return one question to the agent of the host; its errors as those of a cloud.

        `is_offer`: a host that cannot be used is a zone without room, and another one may have it.
        """
        shell = None
        try:
            shell = self._shell(host)
            agent = Host(shell, ROOT)
            agent.install()
            return agent.call(verb, *words, request=request, timeout_s=timeout_s)
        except (DiskFullError, HostKeyError, LoginRefusedError) as error:
            kind = CapacityError if is_offer else TransientError
            raise kind(error.message, cloud=CLOUD, code=type(error).__name__, zone=zone) from error
        except _NotMetError as error:
            kind = CapacityError if is_offer else TransientError
            raise kind(error.message, cloud=CLOUD, code="Unreachable", zone=zone) from error
        except ShellError as error:
            if shell is not None and isinstance(error, UnreachableError):
                shell.close()  # else it may look alive for minutes
            raise TransientError(error.message, cloud=CLOUD, zone=zone, retry_after_s=5.0) from error

    def _shell(self, host: PoolHost) -> Commands:
        """Return the one connection to the host. Of many threads that need a new one the first dials, and the others wait."""
        with self._lock:
            dialling = self._dialling.setdefault(host.name, Lock())
        with dialling:
            shell = self._shells.get(host.name)
            if shell is None or not shell.is_open:
                if shell is not None:
                    shell.close()
                try:
                    shell = self._shells[host.name] = self._dial(login_of(host))
                except UnreachableError as error:
                    raise _NotMetError(error.message) from error
            return shell

    def _check(self, host: PoolHost) -> Finding:
        what = f"{host.name} ({host.address})"
        try:
            self._call(host, "claims")
            said = self._shell(host).run(
                "nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | wc -l; df -Pk . | tail -1"
            )
        except (ProvisionError, ShellError) as error:
            message = error.message
            if host.access.host_key is None and has_authorities(host.access.known_hosts):
                message += f"; @cert-authority lines of {host.access.known_hosts} do not count: add the host's own key"
            return Finding(what, Level.MISSING, message=message)
        gpus, disk = said.out.decode().splitlines()[:2]
        free_gb = int(disk.split()[3]) / 1e6
        if int(gpus) < host.gpus:
            return Finding(
                what,
                Level.MISSING,
                message=f"config.yaml says {host.gpus} {host.accelerator}, nvidia-smi sees {gpus}",
            )
        if free_gb < _FREE_GB:
            return Finding(what, Level.MISSING, message=f"only {free_gb:.1f} GB of its disk are free")
        return Finding(what, Level.FINE)


class _NotMetError(UnreachableError):
    """There was no response, so nothing was sent."""


def login_of(host: PoolHost) -> Login:
    """Raise AuthError if a file for it cannot be read."""
    try:
        return host.access.login(host.name, host.address)
    except OSError as error:
        raise AuthError(
            f"the file {error.filename} for {host.name} cannot be read: {error.strerror}", cloud=CLOUD
        ) from error


def _request(order: MachineOrder, host: PoolHost) -> dict[str, Any]:
    return {
        "token": order.token,
        "tags": order.tags,
        "gpus": math.ceil(order.accelerator_count) if order.accelerator else 0,
        "host_gpus": host.gpus,
        "exclusive": host.exclusive,
        "ports": [*order.ports, *order.public_ports],
    }


def _machine(host: PoolHost, claim: Mapping[str, Any]) -> Machine:
    tags = claim["tags"]
    if claim["ended_at"] is not None:
        state = MachineState.TERMINATED
    else:
        state = MachineState.STOPPING if claim["ending"] else MachineState.RUNNING
    return Machine(
        id=f"{host.name}/{claim['token']}",
        token=claim["token"],
        owner=tags[OWNER_TAG],
        service=tags[SERVICE_TAG],
        replica_id=int(tags[REPLICA_TAG]),
        rank=int(tags[RANK_TAG]),
        num_nodes=int(tags[NODES_TAG]),
        zone=host.place,
        capacity_type=CapacityType(tags[CAPACITY_TAG]),
        state=state,
        address=host.address,
        private_address=host.private_address or host.address,
        launched_at=claim["claimed_at"],
    )
