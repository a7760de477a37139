"""Where a replica may run: ``infra: cloud/region/zone`` and the older keys `cloud`, `region`, `zone`."""

from dataclasses import dataclass, replace

from provisioners import plugins
from skyserve_cli.spec.problems import Problem, did_you_mean, shown

CLOUDS = ("local", "ssh", "aws", "gcp", "azure", "kubernetes")
KUBERNETES = "kubernetes"
_OTHER_NAMES = {"k8s": KUBERNETES}
# Clouds that SkyPilot knows and we do not: their files are parsed, and the error names the cloud.
FOREIGN_CLOUDS = frozenset(
    {
        *("slurm", "runpod", "vast", "oci", "ibm", "scp", "vsphere", "cudo"),
        *("fluidstack", "paperspace", "do", "nebius", "hyperbolic", "primeintellect", "seeweb", "shadeform"),
        *("mithril", "verda", "yotta"),
    }
)


def known_clouds() -> tuple[str, ...]:
    """Return the clouds of this package, then those of installed plug-ins."""
    return (*CLOUDS, *plugins.installed())


def is_cloud(name: str) -> bool:
    return name in CLOUDS or name in plugins.installed()


@dataclass(frozen=True, slots=True)
class InfraPlace:
    """A place where a replica may run. None means any."""

    cloud: str | None = None
    region: str | None = None
    zone: str | None = None


@dataclass(frozen=True, slots=True)
class InvalidInfra:
    """Why a text names no place. `foreign`: it names a cloud that we do not offer; another alternative may do."""

    problem: Problem
    foreign: bool = False


def parse_infra(text: str, path: str) -> InfraPlace | InvalidInfra:
    """Parse ``gcp``, ``aws/us-east-1``, ``gcp/*/us-central1-a`` or ``*``: ``*`` and omitted parts mean any.

    On Kubernetes the parts are a context, a namespace and a zone: ``kubernetes/prod/ml/us-east-1a``.
    """
    parts = text.split("/")
    cloud = parts[0].lower()
    if cloud_of(cloud) == KUBERNETES:
        return _in_cluster(text, parts[1:], path)
    if cloud not in FOREIGN_CLOUDS and (len(parts) > 3 or not all(parts)):
        return InvalidInfra(Problem(path, f"must be cloud[/region[/zone]] (got {shown(text)})", text))
    refusal = cloud_refusal(cloud, text, path)
    if refusal is not None:
        return refusal
    known = [None if part == "*" else part for part in (cloud, *parts[1:])]
    return InfraPlace(*known)


def cloud_of(name: str) -> str:
    """Return a cloud's one name: ``k8s`` is ``kubernetes``."""
    return _OTHER_NAMES.get(name, name)


def _in_cluster(text: str, parts: list[str], path: str) -> InfraPlace | InvalidInfra:
    if len(parts) > 3 or not all(parts):
        return InvalidInfra(
            Problem(path, f"must be kubernetes[/context[/namespace[/zone]]] (got {shown(text)})", text)
        )
    context, namespace, zone = [None if part == "*" else part for part in (*parts, "*", "*", "*")][:3]
    if namespace is not None and context is None:
        return InvalidInfra(Problem(path, f"names a namespace of no context (got {shown(text)})", text))
    region = context if namespace is None else f"{context}:{namespace}"
    return InfraPlace(KUBERNETES, region, zone)


def cloud_refusal(cloud: str, written: str, path: str) -> InvalidInfra | None:
    """Return why `cloud` (lower case) cannot be used here; None if it can, or is ``*``."""
    if cloud == "*" or is_cloud(cloud_of(cloud)):
        return None
    ours = ", ".join(known_clouds())
    if cloud in FOREIGN_CLOUDS:
        message = f"this cloud is not supported yet (got {shown(written)}); we run on {ours}"
        return InvalidInfra(Problem(path, message, written), foreign=True)
    message = f"is not a cloud we know (got {shown(written)}); we run on {ours}"
    return InvalidInfra(
        Problem(path, message, written, did_you_mean(cloud, (*known_clouds(), *sorted(FOREIGN_CLOUDS))))
    )


def narrowed(base: InfraPlace, cloud: str | None, region: str | None, zone: str | None) -> InfraPlace:
    """Return `base` with the older keys laid over it."""
    cloud = None if cloud is None else cloud_of(cloud)
    given = {"cloud": cloud, "region": region, "zone": zone}
    return replace(base, **{key: None if value == "*" else value for key, value in given.items() if value})
