"""`serve controller deploy` and `move`: a controller on another host, or in a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from skyserve_cli.commands import controller_cloud as cloud
from skyserve_cli.commands import controller_cluster as cluster
from skyserve_cli.commands.controller_cloud import MachineOptions
from skyserve_cli.commands.options import Format, OutputFormat, Yes, home
from skyserve_cli.output import CommandFailed, WrongUsage, inform, plural, put, put_json

if TYPE_CHECKING:
    from provisioners.port.commands import HostConnection
    from skyserve_cli.config import Config
    from skyserve_cli.deployment.deploy import DeployOptions
    from skyserve_cli.deployment.move_checks import Rows
    from skyserve_cli.deployment.target import DeployTarget

TargetName = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        show_default=False,
        help="ssh/HOST (of clouds.ssh.pools in config.yaml), ssh/USER@ADDRESS[:PORT], aws/REGION, gcp/REGION, azure/REGION, or "
        "kubernetes/CONTEXT/NAMESPACE.",
    ),
]
HostName = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        show_default=False,
        help="ssh/HOST (of clouds.ssh.pools in config.yaml), ssh/USER@ADDRESS[:PORT], aws/REGION, gcp/REGION or azure/REGION.",
    ),
]
There = Annotated[
    str,
    typer.Option("--home", metavar="PATH", help="Home of the controller there; relative to the user's own."),
]
Identity = Annotated[
    Path | None,
    typer.Option(
        "--identity", metavar="FILE", help="Private key. Default: the SSH agent's, or your own in ~/.ssh."
    ),
]
KnownHosts = Annotated[
    Path | None,
    typer.Option(
        "--known-hosts", metavar="FILE", help="File with the host's key. Default: ~/.ssh/known_hosts."
    ),
]
ServePath = Annotated[
    str | None, typer.Option("--serve", metavar="PATH", help="A `serve` that is there; nothing is installed.")
]
Python = Annotated[
    str, typer.Option("--python", metavar="PATH", help="Python 3.11 or newer, for the installation.")
]
Context = Annotated[
    str | None, typer.Option("--context", metavar="NAME", help="Name of the context. Default: the host's.")
]
CopyFiles = Annotated[
    bool,
    typer.Option(
        "--copy-files",
        help="Copy the files that config.yaml names and the host does not have, private keys of hosts too.",
    ),
]
ReplaceConfig = Annotated[
    bool, typer.Option("--replace-config", help="Replace a config.yaml there that differs from the one here.")
]


def deploy(
    ctx: typer.Context,
    target: TargetName,
    there: There = ".skyserve",
    identity: Identity = None,
    known_hosts: KnownHosts = None,
    serve: ServePath = None,
    python: Python = "python3",
    context: Context = None,
    copy_files: CopyFiles = False,
    replace_config: ReplaceConfig = False,
    config_file: cluster.ConfigFile = None,
    instance_type: cloud.InstanceType = "",
    identity_profile: cloud.IdentityProfile = "",
    yes: Yes = False,
    image: cluster.Image = "",
    storage_class: cluster.StorageClass = "",
    database_secret: cluster.DatabaseSecret = "",
    kubeconfig: cluster.Kubeconfig = None,
    no_cluster_role: cluster.NoClusterRole = False,
    timeout_s: cluster.Timeout = 300.0,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Install and start a controller elsewhere, or upgrade the one there, and add a context for it.

    On a host, the release that runs here is installed in the home directory of the login, config.yaml is copied, and systemd keeps
    the controller running (a user unit, or a system unit for root). In a cloud, a small on-demand machine is rented first; the next run
    finds it by its tag. In Kubernetes, the manifests of this release are applied, with Secrets
    whose values are made here. Replicas and load balancers in regions go on during an upgrade. A run that was interrupted is completed by
    the next one.

    \b
    serve controller deploy ssh/rack-1
    serve controller deploy ssh/ubuntu@10.0.0.5 --identity ~/.ssh/id_ed25519
    serve controller deploy aws/eu-central-1 --identity-profile skyserve-controller
    serve controller deploy kubernetes/prod/serving --image registry.example.com/skyserve-controller:0.2.0
    """
    kind = target.partition("/")[0]
    _insist_on_options(ctx, kind)
    if kind == "kubernetes":
        options = cluster.options_of(
            context or "", image, storage_class, database_secret, config_file, no_cluster_role, timeout_s
        )
        cluster.deploy(target, kubeconfig, options, output)
        return
    _insist_on_file(config_file)
    options_there = DeployValues(there, serve, python, context, copy_files, replace_config, config_file)
    _deploy_to_host(
        *_place(
            target, identity, known_hosts, MachineOptions(instance_type, identity_profile, yes), options_there
        ),
        output,
    )


def _deploy_to_host(found: DeployTarget, options: DeployOptions, output: OutputFormat) -> None:
    from skyserve_cli.deployment import deploy as steps

    with _on(found) as shell:
        deployment = steps.prepare(home(), _config(), found, shell, options, inform)
        result = steps.deploy(deployment, options.context)
        if found.name.partition("/")[0] in cloud.CLOUDS:
            inform("checking what the machine's identity may do")
            for sentence in steps.wrong_clouds(deployment):
                inform(f"not usable from there: {sentence}")
    if output is OutputFormat.JSON:
        put_json({**result, "context": options.context})
        return
    if result["kept_by"] == "keeper":
        inform(
            f"{found.host} has no systemd: the controller is started again when it fails, but not after a reboot of the host"
        )
    what = "started" if result["started"] else "nothing to do: it runs already"
    put(
        f"{what}, process {result['pid']}, version {result['version']}, home {result['home']} on {found.host}"
    )
    inform(f"`serve context use {options.context}` lets the commands call it")


#: Options that are for some kinds of targets, by the names of their parameters.
_KINDS = {
    **dict.fromkeys(("identity", "known_hosts"), ("ssh",)),
    **dict.fromkeys(("there", "serve", "python", "copy_files", "replace_config"), ("ssh", *cloud.CLOUDS)),
    **dict.fromkeys(("instance_type", "identity_profile", "yes"), cloud.CLOUDS),
    **dict.fromkeys(
        ("image", "storage_class", "database_secret", "kubeconfig", "no_cluster_role", "timeout_s"),
        ("kubernetes",),
    ),
}


_FOR_MOVE = {name: kinds for name, kinds in _KINDS.items() if name != "yes"}  # which confirms the move itself


def _insist_on_options(ctx: typer.Context, kind: str, kinds_of: Mapping[str, Sequence[str]] = _KINDS) -> None:
    """Raise WrongUsage for an option that is of another kind of target."""
    if kind not in ("ssh", "kubernetes", *cloud.CLOUDS):
        return  # the target itself is wrong
    names = {str(one.name): one.opts[0] for one in ctx.command.params}
    given = [
        names[name]
        for name, kinds in kinds_of.items()
        if name in names and kind not in kinds and str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")
    ]
    if given:
        raise WrongUsage(f"{', '.join(given)}: is not for {kind}/…")


def move(
    ctx: typer.Context,
    target: HostName,
    there: There = ".skyserve",
    identity: Identity = None,
    known_hosts: KnownHosts = None,
    serve: ServePath = None,
    python: Python = "python3",
    context: Context = None,
    copy_files: CopyFiles = False,
    config_file: cluster.ConfigFile = None,
    move_endpoints: Annotated[
        bool,
        typer.Option(
            "--move-endpoints",
            help="Also move services whose load balancer is beside the controller: their endpoints get the address of the host.",
        ),
    ] = False,
    instance_type: cloud.InstanceType = "",
    identity_profile: cloud.IdentityProfile = "",
    yes: Yes = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Move the controller of this home, with all its services, to another host.

    It is deployed there, the controller here is stopped, its state is sent over SSH and restored, and the controller there
    continues with the same replicas and regional load balancers: nothing is launched or terminated. The context is switched, and no
    controller starts here any more. After an error the controller here goes on; a move that was interrupted is completed by the
    same command.

    \b
    serve controller move ssh/rack-1
    """
    _insist_on_options(ctx, target.partition("/")[0], _FOR_MOVE)
    from skyserve_cli.controller.persistence.moved import read_moved
    from skyserve_cli.deployment.deploy import prepare
    from skyserve_cli.deployment.move import Move

    before = read_moved(home())
    if before is not None and before.target != target:
        raise CommandFailed(before.sentence(home()), code=2)
    _insist_on_file(config_file)
    values = DeployValues(there, serve, python, context, copy_files, config_file is not None, config_file)
    machine = MachineOptions(instance_type, identity_profile, yes)
    found, options = _place(target, identity, known_hosts, machine, values)
    with _on(found) as shell:
        task = Move(
            prepare(home(), _config(), found, shell, options, inform), options.context, move_endpoints
        )
        if before is not None:
            moved = task.resume()
        else:
            _confirm(task.insist(), found, yes=yes)
            moved = task.run()
    if output is OutputFormat.JSON:
        put_json({**moved._asdict(), "host": found.host, "context": options.context})
        return
    put(
        f"moved {plural(len(moved.services), 'service')} with {plural(moved.replicas, 'replica')} to {found.host}; "
        f"no controller ran for {moved.pause_s:g} s"
    )
    inform(f"the commands call it now (context {options.context}); no controller starts here any more")


def _confirm(rows: Rows, target: DeployTarget, *, yes: bool) -> None:
    services = [row["name"] for row in rows["services"] if not row["down"]]
    inform(f"moves {', '.join(services) or 'no service'} to {target.host}")
    if not yes and not typer.confirm("Move the controller?", default=False, err=True):
        raise CommandFailed("nothing was moved")


class DeployValues(NamedTuple):
    """What the command line says about the installation on a host."""

    there: str
    serve: str | None
    python: str
    context: str | None
    copy_files: bool
    replace_config: bool
    config_file: Path | None = None

    def options(self, target: DeployTarget) -> DeployOptions:
        from skyserve_cli.deployment.deploy import DeployOptions

        name = self.context or target.host
        return DeployOptions(
            name, self.serve, self.python, self.copy_files, self.replace_config, self.config_file
        )


def _place(
    target: str,
    identity: Path | None,
    known_hosts: Path | None,
    machine: MachineOptions,
    values: DeployValues,
) -> tuple[DeployTarget, DeployOptions]:
    """Return how the host is reached; the machine of a cloud is rented, if it is not there. Raises CommandFailed."""
    from skyserve_cli.deployment.target import target_of

    if target.partition("/")[0] in cloud.CLOUDS:
        has_python = values.serve is not None or values.python != "python3"
        found = cloud.rented(target, machine, values.context, values.config_file, has_python=has_python)
        found = found._replace(remote=found.remote._replace(home=values.there))
    else:
        found = target_of(target, _config(), there=values.there, identity=identity, known_hosts=known_hosts)
    return found, values.options(found)


def _insist_on_file(config_file: Path | None) -> None:
    if config_file is not None:
        cluster.read_config(config_file)


def _config() -> Config:
    from skyserve_cli.config import load_config

    return load_config(home().config)


@contextmanager
def _on(target: DeployTarget) -> Iterator[HostConnection]:
    """With a connection to the host. Turns errors of SSH into one sentence."""
    from provisioners.port.commands import ShellError

    try:
        with target.connect(home()) as shell:
            yield shell
    except ShellError as error:
        raise CommandFailed(error.message) from error
    except ConnectionError as error:  # a key that cannot be read
        raise CommandFailed(str(error), code=2) from error
