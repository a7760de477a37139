"""What the containers of a Pod run, for sh. Pure.

The first container unpacks the work directory. The second runs `setup`, then `run`, in the image of the service file, and
needs nothing there but sh. A replica of several nodes also needs `getent`: the nodes find each other by the cluster's DNS, and
`run` starts when the name of every node resolves in the Service that lists only those that have finished `setup`.

Tests run the same scripts as processes, so the folders can be moved by SKYSERVE_ROOT.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from provisioners.port.base import is_url
from provisioners.remote.bootstrap_steps import bucket_script, cache_script

ROOT = "/skyserve"
FILES = f"{ROOT}-files"
CACHE = f"{ROOT}-cache"
SETUP_FAILED = "setup failed"  # how the message of a container begins whose `setup` did
NO_FILES = "the work directory cannot be unpacked"
NO_CACHE = "the folder of `cache` cannot be written by the container's user: a node's folder is root's, a claim's gets the group fsGroup"
_ROOT = '"${SKYSERVE_ROOT:-/skyserve}"'
_LOG = '"${SKYSERVE_TERMINATION_LOG:-/dev/termination-log}"'

IS_STARTED = f"test -f {_ROOT}/state/started"


def unpack(targets: Sequence[str]) -> str:
    """Return the script of the first container: archive number I is unpacked below `targets[I]`."""
    lines = ["set -e", f"cd {_ROOT}", "mkdir -p work state mounts"]
    source = '"${SKYSERVE_FILES:-/skyserve-files}"'
    for number, target in enumerate(targets):
        where = shlex.quote(target)
        lines.append(
            f"mkdir -p {where} && cat {source}/{number:02d}-* | tar -xzf - -C {where} || "
            f"{{ echo {shlex.quote(NO_FILES)} >{_LOG}; exit 1; }}"
        )
    return "\n".join(lines)


def main(
    mounts: Mapping[str, str],
    copied: Mapping[str, str],
    variables: Mapping[str, str],
    nodes: Sequence[str],
    cached: Sequence[str] = (),
) -> str:
    """Return the script of the second container.

    `mounts` are the buckets by target, `copied` what the first container has unpacked, by target. `nodes` are the host names
    of all nodes by rank, if there are several. `cached` are the variables of folders that outlive the Pod. The user's scripts are in
    SKYSERVE_SETUP and SKYSERVE_RUN.
    """
    lines = [
        f"cd {_ROOT}/work",
        "shell=$(command -v bash || command -v sh)",
        f'failed() {{ code=$1; echo "{SETUP_FAILED}: $2" >{_LOG}; exit "$code"; }}',
    ]
    if cached:
        lines.append(f"( {cache_script(cached)}\n) || failed 1 {shlex.quote(NO_CACHE)}")
    for target, source in copied.items():
        where = _target(target)
        lines.append(
            f'mkdir -p "$(dirname {where})" && cp -R {_ROOT}/{shlex.quote(source)} {where} || '
            f"failed 1 {shlex.quote(f'{target} cannot be written')}"
        )
    for target, source in mounts.items():
        if is_url(source):
            script = bucket_script(source, target, variables)
            lines.append(f"( {script}\n) || failed 1 {shlex.quote(f'{source} cannot be fetched')}")
    if nodes:
        lines += _await("SKYSERVE_PEERS", nodes, "ips", "every node has an address")
        lines.append('export SKYPILOT_NODE_IPS="$ips"')
    lines += [
        'if [ -n "${SKYSERVE_SETUP:-}" ]; then',
        '"$shell" -c "$SKYSERVE_SETUP"; code=$?',
        '[ "$code" = 0 ] || failed "$code" "it exited with code $code"',
        "fi",
        f": >{_ROOT}/state/started",
    ]
    if nodes:
        lines += _await("SKYSERVE_STARTED", nodes, "_", "every node has finished setup")
    # A shell that is the first process of a container passes no signal on by itself; there it may send one to all others.
    lines += [
        "run=$SKYSERVE_RUN; unset SKYSERVE_SETUP SKYSERVE_RUN",
        '"$shell" -c "$run" & pid=$!',
        "trap 'if [ $$ = 1 ]; then kill -TERM -1; else kill -TERM $pid; fi 2>/dev/null' TERM INT",
        "wait $pid; code=$?",
        "while kill -0 $pid 2>/dev/null; do wait $pid; code=$?; done",
        "exit $code",
    ]
    return "\n".join(lines)


def _await(service: str, nodes: Sequence[str], into: str, what: str) -> list[str]:
    """Wait until the name of every node resolves in the Service; the addresses are in the variable `into` then."""
    names = " ".join(map(shlex.quote, nodes))
    return [
        "command -v getent >/dev/null || failed 1 'a replica of several nodes needs getent in its image'",
        f"{into}=; for name in {names}; do  # until {what}",
        f'until set -- $(getent hosts "$name.${service}") && [ $# -gt 0 ]; do sleep 1; done',
        f'{into}="${{{into}:+${into}\n}}$1"',
        "done",
    ]


def _target(target: str) -> str:
    """Return a target of `file_mounts` in sh: relative ones are below the work directory."""
    if target.startswith("~/"):
        return f'"$HOME"/{shlex.quote(target[2:])}'
    return shlex.quote(target)
