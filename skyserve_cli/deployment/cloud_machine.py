"""The machine of a controller in a cloud: rented by the cloud's own provisioner, and found again by its tag.

It has an owner of its own, which begins with `controller-`: whatever looks for the orphans of a home or of a service never sees it. What
the owner and all keys follow from is in a folder of the home before anything is launched, and so is the place of each launch: after a crash at
any line the next run finds the machine, or sends the same order again, which is the same machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

from policies.model import CapacityType, Offer, Role, Zone
from provisioners.assembly import USER, first_logins
from provisioners.port.base import Candidate, Requirements
from provisioners.port.commands import Login, ShellError
from provisioners.port.errors import CapacityError, ProvisionError, QuotaError, RefusedError, TransientError
from provisioners.port.vm import CONTROLLER_OWNER, Machine, MachineOrder, Machines, MachineState
from provisioners.remote.ssh_config import SshRoute
from provisioners.remote.ssh_keys import Keys, user_data
from provisioners.vm_provisioner import CONSISTENT_AFTER_S
from skyserve_cli.home import Home, secret_file, write_private
from skyserve_cli.output import CommandFailed

SERVICE = "controller"
DISK_GB = 30
POLL_S = 2.0
LAUNCH_TIMEOUT_S = 180.0
BOOT_TIMEOUT_S = 900.0
END_TIMEOUT_S = 900.0

#: The default type of each cloud, with about what it costs on demand: USD per hour at list prices of its cheapest regions.
DEFAULT_TYPES: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        "aws": ("t3.small", 0.0208),  # https://aws.amazon.com/ec2/pricing, us-east-1, read in 2025
        "gcp": ("e2-small", 0.0168),  # https://cloud.google.com/compute/vm-instance-pricing, us-central1
        "azure": ("Standard_B1ms", 0.0207),  # https://azure.microsoft.com/pricing, eastus, Linux
    }
)
#: Images whose Python is new enough, where a cloud's default for replicas has an older one.
IMAGES: Mapping[str, str] = MappingProxyType(
    {"aws": "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"}
)


class CloudTarget(NamedTuple):
    """CLOUD/REGION of the command line."""

    cloud: str
    region: str

    @property
    def name(self) -> str:
        return f"{self.cloud}/{self.region}"

    @property
    def context(self) -> str:
        """Return the name of its context, which is that of its folder, too."""
        return f"{self.cloud}-{self.region}"


class LaunchIntent(NamedTuple):
    """The last launch. `number` counts machines: that of one that was terminated by other means is not used again.

    `at` is when it began, in UNIX seconds; 0 if it is certain that it left nothing.
    """

    zone: str = ""
    instance_type: str = ""
    number: int = 1
    at: float = 0.0


class MachineFiles:
    """The folder of one controller's machine in the home."""

    def __init__(self, home: Home, target: CloudTarget) -> None:
        self.folder = home.root / "controllers" / target.context

    @property
    def identity(self) -> Path:
        return self.folder / "identity"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    def secret(self) -> bytes:
        """Return the 32 bytes that the owner and the keys follow from; drawn on first use."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return secret_file(self.folder / "machine.key", lambda: os.urandom(32))

    def intent(self) -> LaunchIntent:
        try:
            return LaunchIntent(**json.loads((self.folder / "launch.json").read_text()))
        except FileNotFoundError:
            return LaunchIntent()

    def intend(self, intent: LaunchIntent) -> None:
        write_private(self.folder / "launch.json", json.dumps(intent._asdict()).encode())

    def exists(self) -> bool:
        return (self.folder / "machine.key").exists()

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Raise CommandFailed if another command of this home works on the same machine."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise CommandFailed(
                f"another command is at work on {self.folder.name}; wait for its end"
            ) from None
        finally:
            os.close(lock)


def owner_of(secret: bytes) -> str:
    return CONTROLLER_OWNER + hashlib.sha256(secret).hexdigest()[:8]


class Renting(Protocol):
    """What is used of a cloud's provisioner; see `VmCloudProvisioner`."""

    machines: Machines

    def offers(self, need: Requirements) -> Sequence[Offer]: ...

    def open_for(self, owner: str) -> None: ...

    def delete_shared(self, owner: str) -> Sequence[str]: ...


class ControllerMachine:
    """The machine of one target. `report` shows what happens."""

    def __init__(
        self,
        cloud: Renting,
        target: CloudTarget,
        files: MachineFiles,
        report: Callable[[str], None],
        *,
        now: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._cloud = cloud
        self._target = target
        self._files = files
        self._report = report
        self._now = now
        self._sleep = sleep
        self._secret = files.secret()
        self.owner = owner_of(self._secret)

    def find(self) -> Machine | None:
        """Return the machine that there is. Raises CommandFailed for one that does not run and will not by itself."""
        found = [
            one
            for one in self._cloud.machines.machines(self.owner)
            if not one.state.is_gone and one.state is not MachineState.STOPPING
        ]
        for one in found:
            if one.state is MachineState.FAILED:
                raise CommandFailed(
                    f"{one.id} in {one.zone.label}, the controller's machine, does not run ({one.message}); start it with the "
                    "cloud's own tools, or terminate it with `serve controller undeploy`"
                )
        if len(found) > 1:
            listed = ", ".join(one.id for one in found)
            raise CommandFailed(f"{self._target.name} has several machines of this controller: {listed}")
        return found[0] if found else None

    def find_any(self) -> Machine | None:
        """Return a machine that there is, whether it runs or not."""
        machines = self._cloud.machines.machines(self.owner)
        return next((one for one in machines if not one.state.is_gone), None)

    def zones(self) -> Sequence[Zone]:
        """Return the zones of the region. Raises CommandFailed if there is none."""
        need = Requirements(
            (Candidate(cloud=self._target.cloud, region=self._target.region),), role=Role.LOAD_BALANCER
        )
        zones = list(dict.fromkeys(offer.zone for offer in self._cloud.offers(need)))
        if not zones:
            raise CommandFailed(f"{self._target.cloud} has no region {self._target.region}", code=2)
        return zones

    def launch(self, instance_type: str, image: str | None) -> Machine:
        """Launch it in the first zone that has room. Raises CommandFailed with the reason of each zone, or ProvisionError."""
        found = self._settle(instance_type)
        if found is not None:
            return found
        refusals, number = [], self._files.intent().number
        for zone in self._in_order():
            self._report(f"launching {instance_type} in {zone.label}")
            try:
                while True:
                    self._files.intend(LaunchIntent(zone.name, instance_type, number, self._now()))
                    machine = self._create(self._order(zone, instance_type, number, image))
                    if not machine.state.is_gone:
                        return machine
                    number += 1  # the order's machine was terminated by other means
            except TransientError:
                raise
            except ProvisionError as error:  # after any other error nothing is left behind
                self._files.intend(LaunchIntent(zone.name, instance_type, number))
                if not isinstance(error, CapacityError | QuotaError | RefusedError):
                    raise
                refusals.append(error.message)
        raise CommandFailed(f"no machine can be launched: {'; '.join(dict.fromkeys(refusals))}")

    def open_ssh(self) -> None:
        """Let this host in to port 22. Raises ProvisionError."""
        self._cloud.open_for(self.owner)

    def await_login(self, machine: Machine) -> Machine:
        """Wait until it can be logged in to; return it with its address. Raises CommandFailed or ProvisionError."""
        until, shown = self._now() + BOOT_TIMEOUT_S, ""
        first = first_logins(SshRoute(), self._secret, self._files.folder / "first_logins")
        while True:
            sentence = f"{machine.id} boots"
            if machine.state is MachineState.RUNNING and machine.address:
                try:
                    first.prepare(machine)
                    self._write_login(first.login(machine))
                    return machine
                except ShellError as error:
                    sentence = f"waiting for sshd of {machine.id}: {error.message}"
            if sentence != shown:
                self._report(sentence)
                shown = sentence
            if self._now() >= until:
                raise CommandFailed(
                    f"{machine.id} cannot be logged in to after {BOOT_TIMEOUT_S:g} s: {sentence}"
                )
            self._sleep(POLL_S)
            found = self.find()
            if found is None:
                raise CommandFailed(f"{machine.id} was terminated while it booted")
            machine = found

    def terminate(self) -> None:
        """Terminate the machine and remove what came with it. Raises CommandFailed or ProvisionError."""
        self._settle("")
        until = self._now() + END_TIMEOUT_S
        while live := [one for one in self._cloud.machines.machines(self.owner) if not one.state.is_gone]:
            for machine in live:
                if machine.state is not MachineState.STOPPING:
                    self._report(f"terminating {machine.id}")
                    self._cloud.machines.destroy(machine)
            if self._now() >= until:
                raise CommandFailed(
                    f"{live[0].id} is not terminated after {END_TIMEOUT_S:g} s; run the command again"
                )
            self._sleep(POLL_S)
        for orphan in self._cloud.machines.orphans(self.owner):
            self._cloud.machines.remove(orphan)
        left = self._cloud.delete_shared(self.owner)
        if left:
            raise CommandFailed(f"{'; '.join(left)}; run the command again")

    # --- inside

    def _settle(self, instance_type: str) -> Machine | None:
        """Wait until an interrupted launch would be listed, if its order is not sent again; return its machine."""
        intent = self._files.intent()
        if not intent.at or intent.instance_type == instance_type:
            return None
        while (found := self.find_any()) is None and self._now() < intent.at + CONSISTENT_AFTER_S:
            self._report("waiting until the machine of an interrupted launch would be listed")
            self._sleep(POLL_S)
        return found

    def _in_order(self) -> list[Zone]:
        """Return the zone of an interrupted launch first: there the order may have made a machine that is not listed yet."""
        intent = self._files.intent()
        zones = list(self.zones())
        return sorted(zones, key=lambda zone: zone.name != intent.zone)

    def _create(self, order: MachineOrder) -> Machine:
        until = self._now() + LAUNCH_TIMEOUT_S
        while True:
            try:
                return self._cloud.machines.create(order)
            except TransientError as error:
                if self._now() >= until:
                    raise
                self._report(error.message)
                self._sleep(min(30.0, max(POLL_S, error.retry_after_s)))

    def _order(self, zone: Zone, instance_type: str, number: int, image: str | None) -> MachineOrder:
        """Return the order, which is the same to the byte whenever it is made again."""
        keys = Keys(self._secret, self.owner)
        plain = MachineOrder(
            token=f"skyserve-{self.owner}-{number}",
            owner=self.owner,
            service=SERVICE,
            replica_id=0,
            rank=0,
            num_nodes=1,
            zone=zone.physical,
            instance_type=instance_type,
            capacity_type=CapacityType.ON_DEMAND,
            public_key=keys.login(SERVICE, Role.CONTROLLER).public,
            user=USER,
            image=image,
            disk_gb=DISK_GB,
            role=Role.CONTROLLER,
        )
        script = user_data(
            plain, keys.boot_host(plain.token), None
        )  # no lease: it is never terminated by itself
        return replace(plain, user_data=script)

    def _write_login(self, login: Login) -> None:
        """Write the files by which the context logs in."""
        write_private(self._files.identity, login.private_key.encode())
        line = f"{login.address} {login.host_keys[0]}\n"
        write_private(self._files.known_hosts, line.encode())
