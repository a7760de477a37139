"""What may be ordered of the local cloud, and what a node of it knows about itself."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from provisioners.local import process_tree as local_process
from provisioners.local.config import CloudConfig
from provisioners.local.store import CLOUD, LaunchRecord
from provisioners.port.base import LaunchOrder, is_url
from provisioners.port.errors import InvalidRequestError
from provisioners.remote.bootstrap_steps import bucket_program, missing_source

PORT_VARIABLE = "SKYSERVE_REPLICA_PORT"


def check_token(order: LaunchOrder) -> None:
    """Raise InvalidRequestError unless the token can name a folder."""
    if not re.fullmatch(r"[a-z0-9-]{1,63}", order.token):
        raise InvalidRequestError(
            f"{order.token!r} is no token: up to 63 lower-case letters, digits and hyphens", cloud=CLOUD
        )


def check_order(order: LaunchOrder, cloud: CloudConfig) -> None:
    """Raise InvalidRequestError that names everything that is wrong."""
    complaints = _complaints(order, cloud)
    if complaints:
        raise InvalidRequestError("; ".join(complaints), cloud=CLOUD, zone=order.offer.zone)


def _complaints(order: LaunchOrder, cloud: CloudConfig) -> list[str]:
    zone = order.offer.zone
    known = cloud.zone(zone.name)
    found = []
    if zone.cloud != CLOUD or known is None or known[0] != zone.region:
        found.append(f"there is no zone {zone} in the local cloud; see cloud.yaml")
    if order.port is not None and not 0 < order.port < 65536:
        found.append(f"{order.port} is no port")
    if order.workdir is not None and not Path(order.workdir).is_dir():
        found.append(f"workdir {order.workdir} is not a folder of this machine")
    for target, source in order.file_mounts.items():
        wrong = [*copy_problems(target, source), *([] if is_url(source) else [missing_source(source)])]
        found += [f"file_mounts: {target}: {why}" for why in wrong if why is not None]
    return found


def copy_problems(target: str, source: str) -> list[str]:
    """Return what the local cloud cannot copy, where other clouds may."""
    found = []
    path = PurePosixPath(target)
    if path.is_absolute() or target.startswith("~") or ".." in path.parts:
        found.append("on the local cloud files are copied below the work directory only; use a relative path")
    program = bucket_program(source)
    if is_url(source) and program is None:
        found.append(f"{source} is no bucket that can be fetched")
    if program is not None and shutil.which(program) is None:
        found.append(f"{source} needs the program {program}, which this machine does not have")
    return found


def node_environment(order: LaunchOrder, record: LaunchRecord, node_ips: Sequence[str]) -> dict[str, str]:
    """Return what `setup` and `run` see: the user's own environment, the service's variables, and who they are.

    The names of the variables that identify nodes are SkyPilot's, so that its recipes run as they are.

    Nothing of the controller's own settings (SKYSERVE_*: its database, its tokens) goes in. The programs
    installed beside this one are found last, so `serve engine` works whether or not its environment is active.
    """
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    count = order.offer.accelerator_count if order.offer.accelerator else 0
    return {
        **own_environment(),
        "PATH": path,
        "SKYPILOT_NODE_IPS": "\n".join(node_ips),
        "SKYPILOT_NODE_RANK": str(record.rank),
        "SKYPILOT_NUM_NODES": str(record.num_nodes),
        "SKYPILOT_NUM_GPUS_PER_NODE": f"{count:g}",
        **order.env,
        **order.secrets,
        "SKYSERVE_SERVICE": record.service,
        "SKYSERVE_REPLICA_ID": str(record.replica_id),
        "SKYPILOT_SERVE_REPLICA_ID": str(record.replica_id),
        "SKYSERVE_REGION": record.region,
        "SKYSERVE_ZONE": record.zone,
        PORT_VARIABLE: str(record.port),
        local_process.INSTANCE_MARK: record.id,
    }


def own_environment() -> dict[str, str]:
    """The environment we were started in, without variables meant for us alone."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SKYSERVE_")}
