"""`serve controller deploy` and `undeploy` CLOUD/REGION: a small machine for the controller."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from skyserve_cli.commands import controller_cluster as cluster
from skyserve_cli.commands.confirmation import confirm
from skyserve_cli.commands.options import Format, OutputFormat, Yes, home
from skyserve_cli.output import CommandFailed, WrongUsage, inform, put, put_json

if TYPE_CHECKING:
    from skyserve_cli.config import Config
    from skyserve_cli.deployment.cloud import CloudDeployment
    from skyserve_cli.deployment.target import DeployTarget

CLOUDS = ("aws", "gcp", "azure")
_PANEL = "AWS, Google Cloud and Azure"

InstanceType = Annotated[
    str,
    typer.Option(
        "--instance-type",
        metavar="TYPE",
        rich_help_panel=_PANEL,
        show_default=False,
        help="Of the machine. Default: t3.small, e2-small or Standard_B1ms.",
    ),
]
IdentityProfile = Annotated[
    str,
    typer.Option(
        "--identity-profile",
        metavar="NAME",
        rich_help_panel=_PANEL,
        show_default=False,
        help="By which the controller calls its cloud: an instance profile, the email address of a service account, or the id of a "
        "user-assigned identity.",
    ),
]


class MachineOptions(NamedTuple):
    """What the command line says about the machine; `yes` launches it without a question."""

    instance_type: str = ""
    identity_profile: str = ""
    yes: bool = False


def rented(
    name: str, options: MachineOptions, context: str | None, config_file: Path | None, *, has_python: bool
) -> DeployTarget:
    """Have the machine of a target, and return how it is reached; ask before one is launched.

    `has_python`: nothing needs to be installed for the installation. Raises CommandFailed or ProvisionError.
    """
    from provisioners.port.commands import ShellError
    from skyserve_cli.config import load_config
    from skyserve_cli.deployment.cloud import insist_on_own_identity

    insist_on_own_identity(load_config(config_file or home().config))
    deployment = _deployment(name, options)
    deployment.insist_on_context(context or deployment.target.context)
    with deployment.files.alone():
        found = deployment.machine.find()
        if found is None:
            deployment.insist_on_launchable()
            inform(deployment.described())
            confirm("Launch it?", yes=options.yes)
        else:
            inform(f"found {found.id} in {found.zone.label}")
        target = deployment.ready(found)
        if not has_python:
            try:
                with target.connect(home()) as shell:
                    deployment.prepare_python(shell)
            except ShellError as error:
                raise CommandFailed(error.message) from error
    return target


def undeploy(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", show_default=False, help="As it was given to `serve controller deploy`."
        ),
    ],
    force: Annotated[
        bool,
        typer.Option("--force", help="Although services are up there, or the controller does not respond."),
    ] = False,
    purge: cluster.Purge = False,
    kubeconfig: cluster.Kubeconfig = None,
    yes: Yes = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Remove a controller that was deployed to a cloud or a cluster, and its context.

    In a cloud its machine is terminated, with its state. In Kubernetes the objects that deploy made are deleted; the volume, the Secrets
    and the namespace stay, and are named. Refused while services are up there. A run that was interrupted is completed by the next one.

    \b
    serve controller undeploy aws/us-east-1
    serve controller undeploy kubernetes/prod/serving
    """
    if target.partition("/")[0] == "kubernetes":
        cluster.undeploy(target, kubeconfig, output, force=force, purge=purge, yes=yes)
        return
    if purge or kubeconfig is not None:
        raise WrongUsage(f"{'--purge' if purge else '--kubeconfig'}: is for kubernetes/… alone")
    deployment = _deployment(target, MachineOptions())
    if not deployment.files.exists():
        raise CommandFailed(f"no controller was deployed to {target} from this home", code=2)
    with deployment.files.alone():
        found = deployment.machine.find_any()
        if found is not None:
            services = [] if force else deployment.services()
            if services:
                raise CommandFailed(
                    f"services are up there: {', '.join(services)}; take them down first, or move the controller"
                )
            inform(f"terminates {found.id} in {found.zone.label}, with the state of the controller")
            confirm("Terminate it?", yes=yes)
        deployment.machine.terminate()
        deployment.forget()
    if output is OutputFormat.JSON:
        put_json({"target": target, "terminated": None if found is None else found.id})
        return
    put("there was no machine any more" if found is None else f"{found.id} is terminated")


def _deployment(name: str, options: MachineOptions) -> CloudDeployment:
    from skyserve_cli.deployment.cloud import CloudDeployment, target_of

    return CloudDeployment(
        home(), _config(), target_of(name), options.instance_type, options.identity_profile, inform
    )


def _config() -> Config:
    from skyserve_cli.config import load_config

    return load_config(home().config)
