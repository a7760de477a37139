"""The steps on a machine until `setup` runs, as values: print them, compare them, and only then run them (`bootstrap_runner`).

A step is a script for the host's sh, run in the machine's folder there. Secrets go in by standard input. A
step can be started again at any time; one that was done is marked on the host and not done again. After the last one the
agent of the host goes on alone: `setup`, then `run`, whether or not anyone is connected.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from provisioners.port.accelerator_names import Vendor, vendor
from provisioners.port.base import Cache, LaunchOrder, is_url
from provisioners.remote import container_steps
from provisioners.remote.machine_tools import needs, pip_install
from provisioners.remote.step import TRANSFER_S, Content, Step, Tree

_OWN_HOSTS = ("ssh",)  # where nothing is installed
ROOT = ".skyserve"  # below the home of the user we log in as
PORT_VARIABLE = "SKYSERVE_REPLICA_PORT"

_DRIVER_S = 300.0  # a driver may still be loading when sshd responds
_AMD_DEVICES = ("/dev/kfd", "/dev/dri")  # what a container needs to see AMD's GPUs
_COUNTED_BY = {
    Vendor.NVIDIA: ("nvidia-smi", "nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | wc -l"),
    # The driver's list of nodes: those that are processors have the id 0.
    Vendor.AMD: (
        "the driver",
        "cat /sys/class/kfd/kfd/topology/nodes/*/gpu_id 2>/dev/null | grep -cvx 0",
    ),
}


@dataclass(frozen=True, slots=True)
class Front:
    """`certificate` has the private key, too, in PEM. `port` is the one that the firewall has open; None: any that is free."""

    certificate: bytes = field(repr=False)
    port: int | None = None


@dataclass(frozen=True, slots=True)
class ReplicaNode:
    """One machine of a replica.

    `ips` are the addresses of all of them, by rank, as they see each other; `port` is the one that the replica listens on.
    `image` is of the container that the scripts are to run in, if any. With `front` TLS is in front of the replica's port.
    """

    token: str
    rank: int
    ips: tuple[str, ...]
    port: int
    image: str | None = None
    front: Front | None = None

    @property
    def folder(self) -> str:
        """On the host, below the user's home."""
        return f"{ROOT}/machines/{self.token}"


def steps_for(order: LaunchOrder, node: ReplicaNode) -> tuple[Step, ...]:
    """Return everything between the first login and `setup`, in order."""
    return tuple(_steps(order, node))


def _steps(order: LaunchOrder, node: ReplicaNode) -> Iterator[Step]:
    for maker in _COUNTED_BY:
        if gpus := gpu_count(order, maker):
            yield _check_gpus(str(order.offer.accelerator), gpus, maker)
    if order.workdir is not None:
        yield Step(
            "workdir",
            f"copying the work directory {order.workdir}",
            _unpack("."),
            TRANSFER_S,
            Tree(order.workdir, "work"),
        )
    variables = {**order.env, **order.secrets}
    may_install = order.offer.zone.cloud not in _OWN_HOSTS
    for place, (target, source) in enumerate(order.file_mounts.items()):
        yield _mount(f"mount-{place}", target, source, variables, may_install=may_install)
    if node.image is not None:
        gpus = gpu_count(order)
        yield from container_steps.steps(node.image, variables, gpus=gpus, may_install=may_install)
    if order.secrets:
        yield Step(
            "secrets",
            "handing over secrets",
            # Not once `run` has them: they are in no file any more.
            f"[ -e run.pid ] || {{ {_receive(secrets_path(node), json.dumps(dict(order.secrets)).encode())}; }}",
            sends=Content(json.dumps(dict(order.secrets)).encode()),
            always=True,
        )
    if node.front is not None:
        pem = node.front.certificate
        yield Step(
            "tls",
            "handing over the certificate",
            _receive("front.pem", pem),
            sends=Content(pem),
        )
    task = json.dumps(task_for(order, node)).encode()
    yield Step("order", "handing over the order", _receive("order.json", task), sends=Content(task))
    yield Step("start", "starting the agent", 'exec python3 "$AGENT" start .', always=True)


def gpu_count(order: LaunchOrder, maker: Vendor = Vendor.NVIDIA) -> int:
    """GPUs of this maker that a machine must show; a part of one counts as one."""
    name = order.offer.accelerator
    return 0 if not name or vendor(name) is not maker else math.ceil(order.offer.accelerator_count)


def cache_folder(cache: Cache) -> str:
    """Return the folder of a host of the user's own that replicas leave behind."""
    return f"{ROOT}/cache/{cache.folder}"


def task_for(order: LaunchOrder, node: ReplicaNode) -> dict[str, Any]:
    """Return what the agent receives, and keeps. No secrets."""
    cache = order.cache if order.offer.zone.cloud in _OWN_HOSTS else None
    is_cached = cache is not None and cache.claim is None
    return {
        "token": node.token,
        "owner": order.owner,
        "role": order.role.value,
        "cloud": order.offer.zone.cloud,
        "num_nodes": order.num_nodes,
        "has_port": order.port is not None,
        "front": None if node.front is None else {"port": node.front.port, "to": node.port},
        "setup": cached_setup(order) if is_cached else order.setup,
        "cache": cache.environment(f"~/{cache_folder(cache)}") if cache is not None and is_cached else {},
        "run": order.run,
        "env": node_environment(order, node),
        "secrets_path": secrets_path(node),
        "claim_path": f"~/{ROOT}/claims/{node.token}.json",
        "image": node.image,
        "gpus": gpu_count(order),
        "devices": list(_AMD_DEVICES) if gpu_count(order, Vendor.AMD) else [],
        "mounts": [target for target in order.file_mounts if PurePosixPath(target).is_absolute()],
    }


def secrets_path(node: ReplicaNode) -> str:
    """In memory: /dev/shm is a tmpfs on every Linux."""
    return f"/dev/shm/skyserve-{node.token}.json"  # noqa: S108 (0600, and its name is unique)


def node_environment(order: LaunchOrder, node: ReplicaNode) -> Mapping[str, str]:
    """Return what `setup` and `run` see beside the machine's own environment and the secrets.

    The names of the variables that identify nodes are SkyPilot's, so that its recipes run as they are.
    """
    count = order.offer.accelerator_count if order.offer.accelerator else 0
    return {
        "SKYPILOT_NODE_IPS": "\n".join(node.ips),
        "SKYPILOT_NODE_RANK": str(node.rank),
        "SKYPILOT_NUM_NODES": str(order.num_nodes),
        "SKYPILOT_NUM_GPUS_PER_NODE": f"{count:g}",
        **order.env,
        "SKYSERVE_SERVICE": order.service,
        "SKYSERVE_REPLICA_ID": str(order.replica_id),
        "SKYPILOT_SERVE_REPLICA_ID": str(order.replica_id),
        "SKYSERVE_REGION": order.offer.zone.region,
        "SKYSERVE_ZONE": order.offer.zone.name,
        PORT_VARIABLE: str(node.port),
    }


def missing_sources(order: LaunchOrder) -> list[str]:
    """Sentences about what the order wants to copy from this machine and is not there."""
    found = []
    if order.workdir is not None and not Path(order.workdir).is_dir():
        found.append(f"workdir {order.workdir} is not a folder of this machine")
    for target, source in order.file_mounts.items():
        wrong = missing_source(source)
        if wrong is not None:
            found.append(f"file_mounts: {target}: {wrong}")
    return found


def missing_source(source: str) -> str | None:
    """Return why nothing can be copied from there, if that is seen from here: of buckets only the kind."""
    if not is_url(source):
        there = Path(source).expanduser().exists()
        return None if there else f"{source} is not a file or folder of this machine"
    if _bucket(source) is None:
        return (
            f"{source} is no bucket we know (s3://, gs://, https://ACCOUNT.blob.core.windows.net/CONTAINER)"
        )
    return None


def bucket_program(source: str) -> str | None:
    """Return the vendor's program for a bucket's URL; None for other sources."""
    bucket = _bucket(source)
    return None if bucket is None else bucket.fetch(bucket, "", {})[0]


def bucket_script(source: str, target: str, variables: Mapping[str, str]) -> str:
    """For sh: fill `target` from a bucket with the vendor's program, which must be there.

    The variables that the program reads are in its environment.
    """
    bucket = _bucket(source)
    if bucket is None:
        raise ValueError(f"{source} is no bucket")
    known = {key: value for key, value in variables.items() if key.startswith(bucket.credentials)}
    where = shlex.quote(target)
    program, command = bucket.fetch(bucket, where, known)
    return f'{needs(program, source)}\nas=; mkdir -p "$(dirname {where})" && {{ {command}; }}'


def cache_script(variables: Sequence[str]) -> str:
    """For sh, in the environment of the replica: make the folders of its cache, and print what earlier replicas have left there.

    Nothing is locked here. Replicas of a node share the folders, as programs that use such a variable expect of processes of a machine.
    """
    folders = " ".join(f'"${name}"' for name in variables)
    return "\n".join(
        (
            f"for folder in {folders}; do",
            'mkdir -p "$folder" && [ -w "$folder" ] || '
            '{ echo "cache: $folder cannot be written by the user $(id -u)"; exit 1; }',
            'if [ -z "$(ls -A "$folder")" ]; then echo "cache: $folder is empty"',
            'else size=$(du -sh "$folder" 2>/dev/null | cut -f1)',
            'echo "cache: $folder has ${size:-files} of earlier replicas"; fi',
            "done",
        )
    )


def cached_setup(order: LaunchOrder) -> str | None:
    """Return `setup`, after the script of the cache of the node if the order has one."""
    if order.cache is None or order.cache.claim is not None:
        return order.setup
    return f"( {cache_script(order.cache.variables)}\n) || exit 1\n{order.setup or ''}"


def _check_gpus(accelerator: str, count: int, maker: Vendor) -> Step:
    program, command = _COUNTED_BY[maker]
    return Step(
        "gpus",
        f"checking for {count} {accelerator}",
        f"n=$({command})\n"
        f'[ "$n" -ge {count} ] || {{ echo "{count} {accelerator} {"was" if count == 1 else "were"} asked for and '
        f'{program} sees $n" >&2; exit 1; }}',
        _DRIVER_S,
        retry_every_s=5.0,
    )


def _mount(name: str, target: str, source: str, variables: Mapping[str, str], *, may_install: bool) -> Step:
    where = _on_host(target)
    bucket = _bucket(source)
    if bucket is not None:
        known = {key: value for key, value in variables.items() if key.startswith(bucket.credentials)}
        program, command = bucket.fetch(bucket, where, known)
        has = _gets(program, source) if may_install else needs(program, source)
        sudo = f"sudo -n {'-E ' if known else ''}env PATH=$PATH"
        script = f"{has}\n{_parent(where, sudo)}\n{command}"
        if not known:
            return Step(name, f"fetching {source}", script, TRANSFER_S)
        settings = "".join(f"{key}={shlex.quote(value)}\n" for key, value in sorted(known.items()))
        script = f"set -a; . /dev/stdin; set +a\n{script}"
        return Step(name, f"fetching {source}", script, TRANSFER_S, Content(settings.encode()))
    return Step(
        name,
        f"copying {source} to {target}",
        f"{_parent(where)}\n{_unpack('$d')}",
        TRANSFER_S,
        Tree(str(Path(source).expanduser()), PurePosixPath(target).name),
    )


def _on_host(target: str) -> str:
    """Return a target of `file_mounts` in sh: relative ones are below the work directory."""
    if target.startswith("~/"):
        return f'"$HOME"/{shlex.quote(target[2:])}'
    return shlex.quote(target if target.startswith("/") else f"work/{target}")


def _parent(where: str, sudo: str = "sudo -n") -> str:
    """$d is the folder that the target is in, made if need be, and $as becomes who may write there."""
    return f'd=$(dirname {where}); as=; mkdir -p "$d" 2>/dev/null && [ -w "$d" ] || {{ as="{sudo}"; $as mkdir -p "$d"; }}'


def _unpack(folder: str) -> str:
    """Return an archive that was cut off fails, because gzip notices."""
    return f'$as tar --extract --gzip --no-same-owner --directory "{folder}"'


def _receive(path: str, data: bytes) -> str:
    """Return a file from standard input, whole or not at all: its length distinguishes it from a first part of it."""
    check = f'[ "$(wc -c <"$new")" -eq {len(data)} ]'
    return (
        f"umask 077; new={shlex.quote(path)}.new.$$; "
        f'cat >"$new" && {check} && mv -f "$new" {shlex.quote(path)} || {{ rm -f "$new"; exit 1; }}'
    )


# --- buckets


def _gets(program: str, source: str) -> str:
    """Return the vendor's program, or one from PyPI that a bucket can be read with."""
    if program == "gcloud":
        return f"command -v gcloud >/dev/null || {{ {pip_install('gsutil', 'gsutil', source)}; }}"
    return pip_install(program, {"aws": "awscli", "az": "azure-cli"}[program], source)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Where a URL leads.

    `fetch` gives the vendor's program and the command for it; `credentials` are how the variables begin that the program
    takes them from, where the machine has none of its own. `rest` is behind the scheme.
    """

    url: str
    rest: str
    fetch: Callable[[_Bucket, str, Mapping[str, str]], tuple[str, str]]
    credentials: str


def _bucket(source: str) -> _Bucket | None:
    """None for a path, and for a URL of an unknown store."""
    scheme, _, rest = source.rstrip("/").partition("://")
    blob = _BLOB.fullmatch(source.rstrip("/"))
    if blob is not None:
        scheme, rest = "az", f"{blob[1]}/{blob[2]}"
    if not is_url(source) or scheme not in _BUCKETS:
        return None
    fetch, credentials = _BUCKETS[scheme]
    return _Bucket(source.rstrip("/"), rest, fetch, credentials)


def _s3(bucket: _Bucket, where: str, _known: Mapping[str, str]) -> tuple[str, str]:
    u = shlex.quote(bucket.url)
    quiet = "--only-show-errors"
    return "aws", f"$as aws s3 cp {quiet} {u} {where} 2>/dev/null || $as aws s3 sync {quiet} {u} {where}"


def _gs(bucket: _Bucket, where: str, _known: Mapping[str, str]) -> tuple[str, str]:
    u = shlex.quote(bucket.url)
    command = "if command -v gcloud >/dev/null; then g='gcloud storage' r=--recursive; else g='gsutil -q -m' r=-r; fi; "
    folder = f"$as mkdir -p {where} && $as $g rsync $r {u} {where}"
    return "gcloud", f"{command}$as $g cp {u} {where} 2>/dev/null || {{ {folder}; }}"


def _az(bucket: _Bucket, where: str, known: Mapping[str, str]) -> tuple[str, str]:
    """ACCOUNT/CONTAINER/PATH, which is a blob or a folder of blobs.

    Without a key or a token in the variables it is who is logged in, or the machine's identity.
    """
    account, container, path = [*bucket.rest.split("/", 2), "", ""][:3]
    login = "" if any(key.startswith("AZURE_STORAGE_") for key in known) else " --auth-mode login"
    common = f"--account-name {shlex.quote(account)}{login} --output none"
    pattern = f" --pattern {shlex.quote(f'{path}/*')}" if path else ""
    many = (
        f"$as mkdir -p {where} && $as az storage blob download-batch {common} --source {shlex.quote(container)} "
        f"--destination {where}{pattern}"
    )
    one = (
        f"$as az storage blob download {common} --container-name {shlex.quote(container)} "
        f"--name {shlex.quote(path)} --file {where} 2>/dev/null || "
    )
    return "az", f"{one if path else ''}{{ {many}; }}"


_BLOB = re.compile(r"https://([a-z0-9]{3,24})\.blob\.core\.windows\.net/(.+)")
_BUCKETS = {"s3": (_s3, "AWS_"), "gs": (_gs, "CLOUDSDK_"), "az": (_az, "AZURE_")}
