"""`setup` and `run`: how one is run, and its state afterwards.

NAME.pid says that it was started, the lock NAME.lock that it is watched, NAME.exit its exit status, NAME.circumstances what else was the
case when it ended. The process that
watches it has nothing else to do and outlives the daemon, so the exit code is not lost with that.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from provisioners.files import write_text
from provisioners.remote.host_agent.exits import exit_sentence, oom_kills
from provisioners.remote.host_agent.files import is_locked, lock, read_json
from provisioners.remote.host_agent.log import drain, last_line, pipe_of

MARK = "SKYSERVE_MACHINE"  # in the environment of all that belongs to the machine's replica
PORT_VARIABLE = "SKYSERVE_REPLICA_PORT"
CACHE_VARIABLE = "SKYSERVE_CACHE"
NAMES = ("setup", "run")
_PR_SET_CHILD_SUBREAPER = 36
_LAST_WORDS_S = 2.0
_END_TOGETHER_S = 0.5
_SLEEP = "sleep"  # what a container of ours runs


def watch_script(folder: Path, name: str) -> None:
    """Run it and write down its exit status.

    Stays for as long as anything of it is left: orphans of the script fall back to us, and so `stop` finds them.
    """
    held = lock(folder / f"{name}.lock")
    if held is None or was_started(folder, name):
        return
    order = json.loads((folder / "order.json").read_text())
    write_text(folder / f"{name}.pid", str(os.getpid()))
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = pipe_of(folder)
    os.dup2(output, 1)
    os.dup2(output, 2)
    killed_before = oom_kills()
    code = _run(folder, name, order)
    left = _left_behind(order) if (name, code) == (NAMES[-1], 0) else []
    circumstances = {"oom": oom_kills() > killed_before, "left": left}
    write_text(folder / f"{name}.circumstances", json.dumps(circumstances))
    write_text(folder / f"{name}.exit", str(code))
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _run(folder: Path, name: str, order: dict[str, Any]) -> int:
    env, given = environment(order)
    work = str(folder / "work")
    if order["image"]:
        code = create_container(folder, order, env)
        if code != 0:
            return code
        command = exec_command(container_name(order["token"]), work, given, order[name])
    else:
        command = ["/bin/bash" if Path("/bin/bash").exists() else "/bin/sh", "-c", order[name]]
    if name == NAMES[-1]:  # they are not needed any more
        with suppress(FileNotFoundError):
            Path(order["secrets_path"]).unlink()
    try:
        child = subprocess.Popen(command, cwd=work, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
        return 127
    return child.wait()


def _left_behind(order: dict[str, Any]) -> list[str]:
    """Return the names of programs that a script has left, other than those that only end a little later."""
    from provisioners.remote.host_agent.processes import descendants, names_of

    if descendants(os.getpid()):
        time.sleep(_END_TOGETHER_S)
    found = names_of(descendants(os.getpid()))
    if order["image"]:
        command = ["docker", "top", container_name(order["token"]), "-o", "pid,comm"]
        shown = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        rows = [line.split(None, 1) for line in shown.stdout.decode(errors="replace").splitlines()[1:]]
        names = [row[1] for row in rows if len(row) == 2]
        found += [name for name in names if name != _SLEEP]
    return found


def environment(order: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return what the scripts see, and the names of those that are not the machine's own. Secrets come out of memory (tmpfs)."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("SSH_", "LC_ALL", MARK))}
    own["PATH"] = (
        f"{Path.home()}/.local/bin:{own.get('PATH', os.defpath)}"  # where `pip install` puts programs
    )
    given = {**order["env"], **cache_of(order), **(read_json(Path(order["secrets_path"])) or {})}
    claim = claim_of(order)
    if claim is not None:  # of a host that is shared, only these are ours
        given["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, claim["gpus"]))
        if not order["has_port"]:
            given[PORT_VARIABLE] = str(claimed_port(order))
    return {**own, **given, MARK: order["token"]}, sorted(given)


def cache_of(order: dict[str, Any]) -> dict[str, str]:
    """Return the variables of the folder that outlives the replica, which is made."""
    found = {name: str(Path(path).expanduser()) for name, path in order.get("cache", {}).items()}
    if CACHE_VARIABLE in found:
        Path(found[CACHE_VARIABLE]).mkdir(parents=True, exist_ok=True, mode=0o700)
    return found


def claim_of(order: dict[str, Any]) -> Any:
    """On a host that is shared: what of it is ours."""
    return read_json(Path(order["claim_path"]).expanduser())


def is_released(order: dict[str, Any]) -> bool:
    """Its claim on a shared host is over, or is ending: nothing of it starts any more.

    A controller that does not know yet may still be bringing it up, in a new folder.
    """
    claim = claim_of(order)
    return claim is not None and bool(claim["ending"])


def claimed_port(order: dict[str, Any] | None) -> int | None:
    """Return the port that a shared host has found for a replica that takes any."""
    claim = None if order is None or order["has_port"] else claim_of(order)
    return None if claim is None else next(iter(claim["ports"]), None)


def container_name(token: str) -> str:
    return f"skyserve-{token}"


def create_container(folder: Path, order: dict[str, Any], env: dict[str, str]) -> int:
    """Return the container that `setup` and `run` share, so that one finds what the other has installed. It only sleeps."""
    name = container_name(order["token"])
    look = ["docker", "inspect", "--format={{.State.Running}}", name]
    if subprocess.run(look, check=False, stdout=subprocess.PIPE).stdout.strip() == b"true":
        return 0
    quiet = subprocess.DEVNULL
    subprocess.run(["docker", "rm", "--force", name], check=False, stdout=quiet, stderr=quiet)
    return subprocess.run(container_command(folder, order, env), check=False, stdout=quiet).returncode


def container_command(folder: Path, order: dict[str, Any], env: dict[str, str]) -> list[str]:
    command = ["docker", "run", "--detach", "--name", container_name(order["token"])]
    command += ["--network=host", "--ipc=host", f"--entrypoint={_SLEEP}"]
    if order["gpus"]:
        chosen = env.get("CUDA_VISIBLE_DEVICES")
        command += ["--gpus", f'"device={chosen}"' if chosen else "all"]
    for device in order.get("devices", ()):
        command += ["--device", device]
    kept = [env[CACHE_VARIABLE]] if CACHE_VARIABLE in order.get("cache", {}) else []
    for path in [str(folder / "work"), *order["mounts"], *kept]:
        command += ["--volume", f"{path}:{path}"]
    return [*command, order["image"], "infinity"]


def exec_command(container: str, work: str, given: list[str], script: str) -> list[str]:
    """Of the variables only the names: docker takes the values from its own environment, which no other process sees."""
    variables = [part for name in given for part in ("--env", name)]
    return ["docker", "exec", "--workdir", work, *variables, container, "/bin/sh", "-c", script]


def was_started(folder: Path, name: str) -> bool:
    return (folder / f"{name}.pid").exists()


def is_watched(folder: Path, name: str) -> bool:
    return is_locked(folder / f"{name}.lock")


def exit_code(folder: Path, name: str) -> int | None:
    """None if it has not exited, as far as is known; minus the signal if one killed it."""
    try:
        return int((folder / f"{name}.exit").read_text())
    except FileNotFoundError:
        return None


def was_lost(folder: Path, name: str) -> bool:
    """It was started, and its end was not seen: everything was killed, or the machine was rebooted."""
    lost = was_started(folder, name) and not is_watched(folder, name)
    return lost and exit_code(folder, name) is None  # checked last: it may have exited in between


def exit_message(folder: Path, name: str) -> str:
    code = exit_code(folder, name)
    if code is None:
        return f"`{name}` was killed together with the program that watched it; the machine may have been rebooted"
    what = "`run` ended" if name == "run" else f"`{name}` failed"
    drain(folder, _LAST_WORDS_S)  # the exit status is known at once, the output comes through the pipe
    known = read_json(folder / f"{name}.circumstances") or {}  # an earlier agent wrote none
    return exit_sentence(what, code, last_line(folder), known.get("left", ()), oom=bool(known.get("oom")))
