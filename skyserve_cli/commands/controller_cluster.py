"""`serve controller deploy kubernetes/…`: its options, and what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyserve_cli.commands.confirmation import confirm
from skyserve_cli.commands.options import OutputFormat, home
from skyserve_cli.output import WrongUsage, inform, plural, put, put_json

if TYPE_CHECKING:
    from skyserve_cli.deployment.cluster import ClusterOptions

_PANEL = "Kubernetes"

Image = Annotated[
    str,
    typer.Option(
        "--image",
        metavar="IMAGE",
        rich_help_panel=_PANEL,
        show_default=False,
        help="Image of the controller (packaging/Containerfile). Default: the one that is there.",
    ),
]
StorageClass = Annotated[
    str,
    typer.Option(
        "--storage-class",
        metavar="NAME",
        rich_help_panel=_PANEL,
        show_default=False,
        help="Class of the volume of one controller. Default: the cluster's.",
    ),
]
DatabaseSecret = Annotated[
    str,
    typer.Option(
        "--database-secret",
        metavar="NAME",
        rich_help_panel=_PANEL,
        show_default=False,
        help="Two controllers, and a Secret that is there: its `url` is that of their PostgreSQL.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The config.yaml of the controller there. Default: this home's; in Kubernetes the one that is there, or one with Pods of its "
        "own namespace.",
    ),
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig",
        metavar="FILE",
        rich_help_panel=_PANEL,
        help="Default: $KUBECONFIG, then ~/.kube/config.",
    ),
]
NoClusterRole = Annotated[
    bool,
    typer.Option(
        "--no-cluster-role",
        rich_help_panel=_PANEL,
        help="Make no ClusterRole: the controller may not list nodes, and offers come from the pools in config.yaml.",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        min=1.0,
        rich_help_panel=_PANEL,
        help="How long Pods may take to be ready.",
    ),
]

Purge = Annotated[
    bool,
    typer.Option(
        "--purge",
        rich_help_panel=_PANEL,
        help="Also delete the volume, and the Secrets of keys and certificate: the state is lost.",
    ),
]


def options_of(
    context: str,
    image: str,
    storage_class: str,
    database_secret: str,
    config_file: Path | None,
    no_cluster_role: bool,
    timeout_s: float,
) -> ClusterOptions:
    """Return the options as values. Raises WrongUsage if the file is no config.yaml."""
    from skyserve_cli.deployment.cluster import ClusterOptions

    config = None if config_file is None else read_config(config_file)
    return ClusterOptions(
        context, image, storage_class, database_secret, config, not no_cluster_role, timeout_s
    )


def deploy(name: str, kubeconfig: Path | None, options: ClusterOptions, output: OutputFormat) -> None:
    """Deploy to a namespace and print what became of it."""
    from skyserve_cli.deployment.cluster import ClusterDeployment, target_of
    from skyserve_cli.deployment.deploy import insist_on_context

    target = target_of(name, _file(kubeconfig))
    options = options._replace(context=options.context or target.context)
    insist_on_context(home(), target.remote, options.context)
    result = ClusterDeployment(home(), target, options, inform).run()
    if output is OutputFormat.JSON:
        put_json({**result, "context": options.context})
        return
    changed = plural(len(result["changed"]), "object") + " changed" if result["changed"] else "nothing to do"
    put(
        f"{changed}; {plural(result['controllers'], 'controller')} of version {result['version']} in the namespace "
        f"{target.namespace} of {target.context}"
    )
    inform(f"`serve context use {options.context}` lets the commands call it")


def undeploy(
    name: str, kubeconfig: Path | None, output: OutputFormat, *, force: bool, purge: bool, yes: bool
) -> None:
    """Remove the controller from a namespace, and print what is left there."""
    from skyserve_cli.deployment.cluster import target_of
    from skyserve_cli.deployment.cluster_removal import ClusterRemoval

    target = target_of(name, _file(kubeconfig))
    removal = ClusterRemoval(home(), target, inform)
    removal.insist(force=force)
    state = ", with its volume and its keys" if purge else ""
    confirm(f"Remove the controller in {target.namespace} of {target.context}{state}?", yes=yes)
    found = removal.run(purge=purge)
    if output is OutputFormat.JSON:
        put_json({"target": name, **found._asdict()})
        return
    put(f"{plural(len(found.removed), 'object')} removed" if found.removed else "there was none any more")
    for sentence in found.left:
        put(f"left: {sentence}")


def _file(kubeconfig: Path | None) -> str:
    """Return where the kubeconfig is; "" for the default one. Raises WrongUsage."""
    if kubeconfig is not None and not kubeconfig.expanduser().is_file():
        raise WrongUsage(f"--kubeconfig: there is no file {kubeconfig}")
    return "" if kubeconfig is None else str(kubeconfig.expanduser().absolute())


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a config.yaml. Raises WrongUsage if it is none."""
    import yaml

    from skyserve_cli.config import ConfigError, load_config

    if not path.is_file():
        raise WrongUsage(f"--config: there is no file {path}")
    try:
        load_config(path)
    except ConfigError as error:
        raise WrongUsage(f"--config: {error}") from None
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
