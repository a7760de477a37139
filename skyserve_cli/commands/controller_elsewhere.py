"""`serve controller deploy` and `move`: a controller on another host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyserve_cli.commands.options import Format, OutputFormat, Yes, home
from skyserve_cli.output import CommandFailed, inform, plural, put, put_json

if TYPE_CHECKING:
    from provisioners.port.commands import HostConnection
    from skyserve_cli.config import Config
    from skyserve_cli.deployment.deploy import DeployOptions
    from skyserve_cli.deployment.move_checks import Rows
    from skyserve_cli.deployment.target import DeployTarget

TargetName = Annotated[
    str,
    typer.Argument(
        metavar="ssh/HOST",
        show_default=False,
        help="A host of clouds.ssh.pools in config.yaml, or ssh/USER@ADDRESS[:PORT].",
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
    target: TargetName,
    there: There = ".skyserve",
    identity: Identity = None,
    known_hosts: KnownHosts = None,
    serve: ServePath = None,
    python: Python = "python3",
    context: Context = None,
    copy_files: CopyFiles = False,
    replace_config: ReplaceConfig = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Install and start a controller on another host, or upgrade the one there, and add a context for it.

    The release that runs here is installed in the home directory of the login, config.yaml is copied, and systemd keeps the
    controller running (a user unit, or a system unit for root). Replicas and load balancers go on during an upgrade. A run that
    was interrupted is completed by the next one.

    \b
    serve controller deploy ssh/rack-1
    serve controller deploy ssh/ubuntu@10.0.0.5 --identity ~/.ssh/id_ed25519
    """
    from skyserve_cli.deployment import deploy as steps

    found, options = _chosen(
        target, there, identity, known_hosts, serve, python, context, copy_files, replace_config
    )
    with _on(found) as shell:
        deployment = steps.prepare(home(), _config(), found, shell, options, inform)
        result = steps.deploy(deployment, options.context)
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


def move(
    target: TargetName,
    there: There = ".skyserve",
    identity: Identity = None,
    known_hosts: KnownHosts = None,
    serve: ServePath = None,
    python: Python = "python3",
    context: Context = None,
    copy_files: CopyFiles = False,
    move_endpoints: Annotated[
        bool,
        typer.Option(
            "--move-endpoints",
            help="Also move services whose load balancer is beside the controller: their endpoints get the address of the host.",
        ),
    ] = False,
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
    from skyserve_cli.controller.persistence.moved import read_moved
    from skyserve_cli.deployment.deploy import prepare
    from skyserve_cli.deployment.move import Move

    before = read_moved(home())
    if before is not None and before.target != target:
        raise CommandFailed(before.sentence(home()), code=2)
    found, options = _chosen(target, there, identity, known_hosts, serve, python, context, copy_files, False)
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


def _chosen(
    target: str,
    there: str,
    identity: Path | None,
    known_hosts: Path | None,
    serve: str | None,
    python: str,
    context: str | None,
    copy_files: bool,
    replace_config: bool,
) -> tuple[DeployTarget, DeployOptions]:
    from skyserve_cli.deployment.deploy import DeployOptions
    from skyserve_cli.deployment.target import target_of

    found = target_of(target, _config(), there=there, identity=identity, known_hosts=known_hosts)
    name = context or found.host
    return found, DeployOptions(name, serve, python, copy_files, replace_config)


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
