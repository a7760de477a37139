"""`serve controller deploy CLOUD/REGION`: a machine of the cloud's provisioner, then the deployment over SSH."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable

from provisioners.assembly import USER, VmCloudProvisioner
from provisioners.clock import unix_now
from provisioners.offers.catalog import load
from provisioners.port.commands import HostConnection
from provisioners.port.vm import Machine
from skyserve_cli.clouds import Clouds
from skyserve_cli.config import Config
from skyserve_cli.config_clouds import AwsConfig, RentedConfig
from skyserve_cli.controller.api.client import AWAY, ControllerClient, RefusedError
from skyserve_cli.controller.api.remote import LOCAL, Contexts, Remote, SshPlace, checked
from skyserve_cli.deployment.cloud_machine import (
    DEFAULT_TYPES,
    IMAGES,
    CloudTarget,
    ControllerMachine,
    MachineFiles,
)
from skyserve_cli.deployment.target import DeployTarget
from skyserve_cli.home import Home
from skyserve_cli.output import CommandFailed, WrongUsage

#: What the identity of a machine is called in each cloud, and its key in config.yaml.
_IDENTITIES = {
    "aws": ("an instance profile", "instance_profile"),
    "gcp": ("a service account", "service_account"),
    "azure": ("a user-assigned identity", "identity"),
}
_PYTHON = """set -e
python3 -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && exit 0
command -v apt-get >/dev/null || exit 0
export DEBIAN_FRONTEND=noninteractive
sudo -n apt-get update -qq >/dev/null
sudo -n --preserve-env=DEBIAN_FRONTEND apt-get install -qqy python3-venv >/dev/null
"""
_PYTHON_TIMEOUT_S = 900.0


def target_of(name: str) -> CloudTarget:
    """Return what CLOUD/REGION names. Raises WrongUsage."""
    cloud, _, region = name.partition("/")
    if cloud not in DEFAULT_TYPES or not re.fullmatch(r"[a-z][a-z0-9-]+", region):
        raise WrongUsage(f"{name}: must be {', '.join(f'{one}/REGION' for one in DEFAULT_TYPES)}")
    return CloudTarget(cloud, region)


class CloudDeployment:
    """What `deploy` and `undeploy` do about one target. `report` shows what happens.

    An empty `instance_type` is the cloud's default; `identity` is that of a machine that is launched.
    """

    def __init__(
        self,
        home: Home,
        config: Config,
        target: CloudTarget,
        instance_type: str,
        identity: str,
        report: Callable[[str], None],
    ) -> None:
        self.home = home
        self.target = target
        self.instance_type = instance_type or DEFAULT_TYPES[target.cloud][0]
        self.identity = identity
        self.report = report
        self.files = MachineFiles(home, target)
        self._section = self._checked(config)
        self._machine: ControllerMachine | None = None
        self._config = config

    @property
    def machine(self) -> ControllerMachine:
        if self._machine is None:
            cloud = self._cloud()
            self._machine = ControllerMachine(cloud, self.target, self.files, self.report, now=unix_now)
        return self._machine

    def insist_on_context(self, name: str) -> None:
        """Raise WrongUsage if the name is that of another controller."""
        known = Contexts.of(self.home).remotes.get(name)
        if name == LOCAL or (known is not None and known.identity != str(self.files.identity)):
            raise WrongUsage(f"--context: {name} is the context of another controller; choose another name")

    def described(self) -> str:
        """Return what is to be launched, with its price."""
        kind, usd = DEFAULT_TYPES[self.target.cloud]
        price = f"about ${usd:g} per hour" if self.instance_type == kind else "whose price is not known here"
        return f"one on-demand {self.instance_type} in {self.target.name}, {price}"

    def insist_on_launchable(self) -> None:
        """Raise WrongUsage if no machine can be launched with these options."""
        what, _ = _IDENTITIES[self.target.cloud]
        if not self.identity:
            raise WrongUsage(
                f"--identity-profile: name {what} with the permissions that `serve check --policy {self.target.cloud}` prints, by "
                f"which the controller calls {self.target.cloud} (docs/howto/another-host.md)"
            )
        self.machine.zones()

    def ready(self, found: Machine | None) -> DeployTarget:
        """Have the machine, and return how it is reached. Raises CommandFailed or ProvisionError."""
        self.machine.open_ssh()
        if found is None:
            found = self.machine.launch(self.instance_type, self._image())
            self.machine.open_ssh()
        machine = self.machine.await_login(found)
        assert machine.address is not None  # noqa: S101 (`await_login` has connected to it)
        url = SshPlace(USER, machine.address, 22).url()
        paths = {"identity": str(self.files.identity), "known_hosts": str(self.files.known_hosts)}
        remote = checked(Remote(url, "", **paths), self.target.name)
        self._follow(remote)
        return DeployTarget(self.target.name, self.target.context, remote)

    def prepare_python(self, shell: HostConnection) -> None:
        """Have a Python with `venv` there. Raises ShellError."""
        self.report("installing python3-venv, if it is missing")
        shell.run(_PYTHON, timeout_s=_PYTHON_TIMEOUT_S)

    def services(self) -> list[str]:
        """Return the services that are up there. Raises CommandFailed where that is not known."""
        for remote in self._remotes().values():
            try:
                return [one["name"] for one in ControllerClient(self.home, remote).services()]
            except (*AWAY, RefusedError) as error:
                raise CommandFailed(
                    f"{error}; whether services are up there is not known (--force terminates the machine anyway)"
                ) from error
        return []

    def forget(self) -> None:
        """Remove the contexts of the machine, and what the home knows of it."""
        contexts, gone = Contexts.of(self.home), self._remotes()
        kept = {name: remote for name, remote in contexts.remotes.items() if name not in gone}
        current = LOCAL if contexts.current in gone else contexts.current
        Contexts(current, kept).write(self.home)
        self.files.remove()

    # --- inside

    def _checked(self, config: Config) -> RentedConfig:
        section = config.clouds.get(self.target.cloud)
        if not isinstance(section, RentedConfig) or not section.enabled:
            raise WrongUsage(
                f"{self.target.cloud} is not enabled: add `clouds: {{{self.target.cloud}: {{}}}}` to {self.home.config}"
            )
        if section.bastion is not None or section.proxy_command is not None:
            raise WrongUsage(
                f"clouds.{self.target.cloud}: commands reach the controller by SSH at the machine's own address, not by a bastion; "
                "rent the machine yourself and use ssh/USER@ADDRESS"
            )
        region, regions = self.target.region, section.regions
        known = {listing.region for listing in load(self.home.root).of(self.target.cloud).listings}
        if region not in known:
            close = difflib.get_close_matches(region, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise WrongUsage(f"{self.target.name}: {self.target.cloud} has no region {region}{hint}")
        if regions is not None and region not in regions:
            raise WrongUsage(
                f"{self.target.name}: clouds.{self.target.cloud}.regions allows {', '.join(regions)}"
            )
        return section

    def _cloud(self) -> VmCloudProvisioner:
        """Return the provisioner, which gives machines the controller's identity instead of that of replicas."""
        _, key = _IDENTITIES[self.target.cloud]
        changed = {key: self.identity or None, "regions": (self.target.region,)}
        section = self._section.model_copy(update=changed)
        clouds = {**self._config.clouds, self.target.cloud: section}
        made = Clouds(self.home, self._config.model_copy(update={"clouds": clouds})).get(self.target.cloud)
        assert isinstance(made, VmCloudProvisioner)  # noqa: S101 (all clouds of DEFAULT_TYPES are)
        return made

    def _image(self) -> str | None:
        """Return the image that replaces the provisioner's default: one of the user's goes first."""
        return None if self._section.image is not None else IMAGES.get(self.target.cloud)

    def _remotes(self) -> dict[str, Remote]:
        """Return the contexts that log in to this machine."""
        identity = str(self.files.identity)
        return {name: one for name, one in Contexts.of(self.home).remotes.items() if one.identity == identity}

    def _follow(self, remote: Remote) -> None:
        """Give the machine's contexts the address that it has now."""
        contexts, own = Contexts.of(self.home), self._remotes()
        changed = {name: one._replace(url=remote.url) for name, one in own.items() if one.url != remote.url}
        if changed:
            contexts._replace(remotes={**contexts.remotes, **changed}).write(self.home)


def insist_on_own_identity(config: Config) -> None:
    """Raise WrongUsage if a config.yaml names credentials that the machine does not have."""
    section = config.clouds.get("aws")
    if isinstance(section, AwsConfig) and section.profile is not None:
        raise WrongUsage(
            f"clouds.aws.profile: the machine has no profile {section.profile}, but its instance profile; give the controller a "
            "config.yaml without it (--config FILE)"
        )
