"""What a file may say although nothing acts on it yet. The user gets a warning with the path; nothing is dropped silently.

A feature that arrives deletes its row. One that arrives on some clouds and means nothing on others keeps a row that
names these.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyserve_cli.spec.problems import Loc, SpecWarning, dotted


def _given(value: object) -> bool:
    return value not in (None, False, 0, {}, [])


@dataclass(frozen=True, slots=True)
class NotYet:
    """`path` is dotted, without the indices of any_of and ordered, and with * for a path on the replica.

    `meanwhile` is what happens instead. With `clouds` it is so on these only.
    """

    path: str
    meanwhile: str
    applies: Callable[[Any], bool] = _given
    clouds: tuple[str, ...] = ()


def _is_git(value: object) -> bool:
    return isinstance(value, dict) and "url" in value


def _is_container(value: object) -> bool:
    images = value if isinstance(value, dict) else {"*": value}
    return "docker" in images or any(str(image).startswith("docker:") for image in images.values())


def _is_machine_image(value: object) -> bool:
    """Return one for all places; a mapping leads to no place that it does not name."""
    return isinstance(value, str) and not value.startswith("docker:")


def _fills_a_bucket(mount: object) -> bool:
    return isinstance(mount, dict) and bool(mount.get("name")) and bool(mount.get("source"))


def _is_mounted(mount: object) -> bool:
    if not isinstance(mount, dict):
        return False
    mode = mount.get("mode") or ("mount" if mount.get("name") else "copy")
    return str(mode).lower() != "copy"


def _is_claim(cache: object) -> bool:
    return cache == "pvc" or (isinstance(cache, dict) and cache.get("kind") == "pvc")


_SKYPILOT_ONLY = "it is a setting of SkyPilot's own machinery"
_LOCAL, _OWN = ("local",), ("local", "ssh")
_RENTED = ("aws", "gcp", "azure", "lambda")

NOT_YET: tuple[NotYet, ...] = (
    NotYet("resources.instance_type", "every machine is this one", clouds=_LOCAL),
    NotYet("resources.cpus", "machines are taken as they are", clouds=_OWN),
    NotYet("resources.memory", "machines are taken as they are", clouds=_OWN),
    NotYet("resources.disk_size", "the machine's own disk is used", clouds=_OWN),
    NotYet("resources.disk_size", "a Pod uses the disk of its node", clouds=("kubernetes",)),
    NotYet("resources.disk_tier", "the cloud's default disk is used"),
    NotYet("resources.network_tier", "the cloud's default network is used"),
    NotYet("resources.local_disk", "offers are not filtered by it"),
    NotYet(
        "resources.image_id", "setup and run start on this machine, in no container", _is_container, _LOCAL
    ),
    NotYet("resources.image_id", "machines run what they run", _is_machine_image, _OWN),
    NotYet("resources.labels", "there is nothing to label", clouds=_LOCAL),
    NotYet("resources.accelerator_args", "the cloud's defaults are used"),
    NotYet("resources.volumes", "no volume is attached"),
    NotYet("resources.autostop", "a service ends with `serve down`"),
    NotYet("resources.priority", _SKYPILOT_ONLY),
    NotYet("resources.priority_class", _SKYPILOT_ONLY),
    NotYet("workdir", "a git repository is not checked out; clone it in setup", _is_git),
    NotYet("file_mounts.*", "no bucket is made; the files are copied to each machine", _fills_a_bucket),
    NotYet("file_mounts.*", "files are copied, not mounted: files written there stay there", _is_mounted),
    NotYet("file_mounts.*.type", _SKYPILOT_ONLY),
    NotYet("file_mounts.*.mount_options", "files are copied, not mounted"),
    NotYet("file_mounts.*.config", "files are copied, not mounted"),
    NotYet("volumes", "no volume is mounted"),
    NotYet(
        "cache", "a rented machine is deleted with its disk, and weights are downloaded again", clouds=_RENTED
    ),
    NotYet("cache", "a claim is of Kubernetes, and weights are downloaded again", _is_claim, _OWN),
    NotYet("managed_secrets", "replicas do not get them; name them in secrets"),
    NotYet("config", f"{_SKYPILOT_ONLY}; its kubernetes.pod_config is written as kubernetes.pod"),
    NotYet("inputs", _SKYPILOT_ONLY),
    NotYet("outputs", _SKYPILOT_ONLY),
    NotYet("api_server_access", _SKYPILOT_ONLY),
)


def not_yet_warnings(tree: Mapping[str, Any], enabled: Sequence[str]) -> list[SpecWarning]:
    """Return one warning for each thing in the file that nothing acts on. `enabled` are the clouds that "any" means."""
    warnings: list[SpecWarning] = []
    of_hosts: dict[Loc, tuple[NotYet, list[Loc]]] = {}
    for loc, value in _walk(tree, ()):
        for row in NOT_YET:
            if row.path != _row_path(loc) or not row.applies(value):
                continue
            if not row.clouds:
                warnings.append(SpecWarning(dotted(loc), f"not acted on yet: {row.meanwhile}"))
            elif here := [cloud for cloud in row.clouds if cloud in _clouds_at(tree, loc, enabled)]:
                if "ssh" in here and row.clouds == _OWN and row.applies is _given:
                    of_hosts.setdefault(loc[:-1], (row, []))[1].append(loc)
                    continue
                where = " and ".join(here)
                warnings.append(SpecWarning(dotted(loc), f"not acted on by {where}: {row.meanwhile}"))
    return [*warnings, *(_in_one_line(row, locs) for row, locs in of_hosts.values())]


def _in_one_line(row: NotYet, locs: Sequence[Loc]) -> SpecWarning:
    """Return the sizes in one alternative that hosts of the user's own do not act on."""
    others = ", ".join(str(loc[-1]) for loc in locs[1:])
    more = f"; the same holds for {others}" if others else ""
    return SpecWarning(dotted(locs[0]), f"not acted on by ssh: {row.meanwhile}{more}")


def _clouds_at(tree: Mapping[str, Any], loc: Loc, enabled: Sequence[str]) -> set[str]:
    """Return where the alternatives may be that the key is about.

    "any" means this machine, or hosts of the user's own, only if there is nothing else.
    """
    base = tree.get("resources") or {}
    alternatives = base.get("any_of") or base.get("ordered") or [base]
    meant = [alternatives[loc[2]]] if _is_in_alternative(loc) and isinstance(loc[2], int) else alternatives
    remote = {cloud for cloud in enabled if cloud != "local"}
    remote = remote - {"ssh"} or remote  # about hosts of their own users learn when they choose them
    clouds: set[str] = set()
    for one in meant:
        said = (one.get("infra"), one.get("cloud"), base.get("infra"), base.get("cloud"))
        cloud = str(next((word for word in said if word), "*")).partition("/")[0].lower()
        clouds |= (remote or set(enabled)) if cloud == "*" else {cloud}
    return clouds


def _is_in_alternative(loc: Loc) -> bool:
    return loc[0] == "resources" and len(loc) > 2 and loc[1] in ("any_of", "ordered")


def _row_path(loc: Loc) -> str:
    if loc[0] == "file_mounts" and len(loc) > 1:
        return ".".join(("file_mounts", "*", *map(str, loc[2:])))
    return dotted((loc[0], *loc[3:]) if _is_in_alternative(loc) else loc)


def _walk(value: object, loc: Loc) -> Iterator[tuple[Loc, object]]:
    if loc:
        yield loc, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk(inner, (*loc, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _walk(inner, (*loc, index))
