"""What must hold between `cache` and the rest of a service file."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

from provisioners.kubernetes.pod_defaults import runs_as_other
from skyserve_cli.spec.cache import CacheSection
from skyserve_cli.spec.model import CacheSpec, ResourceChoice
from skyserve_cli.spec.problems import Problem, SpecWarning, dotted

#: By kind the clouds on which a folder outlives a replica.
CLOUDS: Mapping[str, tuple[str, ...]] = {"node": ("local", "ssh", "kubernetes"), "pvc": ("kubernetes",)}


def problems(
    cache: CacheSection, envs: Iterable[str], secrets: Iterable[object], choices: Sequence[ResourceChoice]
) -> Iterator[Problem]:
    """Yield what does not go with the rest of the file."""
    if cache.kind == "pvc" and cache.claim is None:
        hint = "write cache: {kind: pvc, claim: NAME}; docs/howto/company-cluster.md has the manifest of one"
        yield Problem(
            "cache.claim", "is missing: the PersistentVolumeClaim that keeps the weights", hint=hint
        )
    if cache.kind != "pvc" and cache.claim is not None:
        yield Problem("cache.claim", f"is for kind: pvc; {cache.kind} has no claim", cache.claim)
    named = {"envs": {*envs}, "secrets": {str(one).removeprefix("secrets:") for one in secrets}}
    for section, names in named.items():
        for name in cache.variables:
            if name in names:
                hint = "take it out, or out of cache.variables"
                message = "cannot stand next to cache, which sets it to a folder that outlives the replica"
                yield Problem(dotted((section, name)), message, hint=hint)
    clouds = {cloud for choice in choices for cloud, _ in choice.places()}
    if clouds and None not in clouds and not clouds & {*CLOUDS[cache.kind]}:
        where = " and ".join(sorted(map(str, clouds)))
        why = "a claim is of Kubernetes" if cache.kind == "pvc" else "a machine is deleted with its disk"
        hint = "leave cache out, and read the weights from a bucket of the region in file_mounts, or from an image"
        yield Problem("cache.kind", f"{cache.kind} keeps nothing on {where}: {why}", hint=hint)


def warnings(cache: CacheSpec, pod: str) -> Iterator[SpecWarning]:
    """Yield what does not go with a patch over the Pod."""
    spec = json.loads(pod).get("spec") or {}
    main: Mapping[str, object] = next(
        (one for one in spec.get("containers") or () if one.get("name") == "main"), {}
    )
    if cache.kind == "node" and runs_as_other(spec, main):
        message = (
            "is a folder that the kubelet makes for root, and kubernetes.pod runs the container as another user: "
            "use kind: pvc with fsGroup, or have the folder given to that user on each node"
        )
        yield SpecWarning("cache.kind", message)
