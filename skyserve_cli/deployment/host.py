"""A host on which a controller is, or will be: what is there, and the steps that change it. Over one SSH connection."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from provisioners.port.commands import CommandError, CommandOutput, HostConnection
from skyserve_cli.deployment.wheel import Wheel
from skyserve_cli.output import CommandFailed

BASE = ".local/share/skyserve"
UNIT = "skyserve-controller"
INSTALL_TIMEOUT_S = 1800.0
START_TIMEOUT_S = 120.0
_NO_LOCK = 75

_LOOK = """cd || exit 1
echo "user=$(id -u)"; echo "login=$(id -un)"; echo "folder=$(pwd -P)"
if [ -d /run/systemd/system ] && command -v systemctl >/dev/null; then echo systemd=1; fi
home={home}
[ -d "$home" ] && echo exists=1
[ -f "$home/config.yaml" ] && echo config=1
[ -f "$home/state.db" ] && echo state=1
[ -f "$home/incoming.json" ] && echo incoming=1
[ -f "$home/moved.json" ] && echo moved=1
held() {{ [ -e "$home/$1" ] && ! flock -n "$home/$1" true; }}
held controller.lock && echo running=1
held keeper.lock && echo keeper=1
exit 0
"""

# A step that was cut off goes on there for a while: the lock makes the next command wait for it.
_INSTALL = """set -e
umask 077
cd "$HOME/{base}"
exec 9>lock; flock -w 900 9 || {{ echo "another installation is under way" >&2; exit {no_lock}; }}
if [ ! -e versions/{digest}/complete ]; then
  rm -rf versions/{digest}/venv
  {python} -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    {{ echo "a controller needs Python 3.11, and this host has $({python} --version 2>&1); name another with --python" >&2; exit 1; }}
  {python} -m venv versions/{digest}/venv >&2 || {{ echo "python3 -m venv failed; install python3-venv" >&2; exit 1; }}
  versions/{digest}/venv/bin/python -m pip install --quiet --disable-pip-version-check {requirement} >&2
  versions/{digest}/venv/bin/python -m lb.agent.native_files versions/{digest}/venv/lib/python3.*/site-packages >&2
  touch versions/{digest}/complete
fi
touch versions/{digest}
ls -td versions/*/ | tail -n +3 | xargs -r rm -rf
"""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What was found. `home` is the absolute path of the controller's home, `folder` the user's home directory."""

    user: int
    login: str
    folder: str
    home: str
    has_systemd: bool
    exists: bool
    has_config: bool
    has_state: bool
    is_incoming: bool
    was_moved: bool
    is_running: bool
    has_keeper: bool

    @property
    def unit(self) -> str:
        """Return the name of the unit: one for each home."""
        if self.home == f"{self.folder}/.skyserve":
            return UNIT
        return f"{UNIT}-{hashlib.sha256(self.home.encode()).hexdigest()[:8]}"


def look(shell: HostConnection, home: str) -> HostFacts:
    """Raise ShellError. A relative home starts at the user's home directory."""
    out = shell.run(_LOOK.format(home=shlex.quote(home))).out.decode()
    found = dict(line.partition("=")[::2] for line in out.splitlines() if "=" in line)
    folder = found["folder"]
    return HostFacts(
        int(found["user"]),
        found["login"],
        folder,
        home if home.startswith("/") else f"{folder}/{home}",
        "systemd" in found,
        "exists" in found,
        "config" in found,
        "state" in found,
        "incoming" in found,
        "moved" in found,
        "running" in found,
        "keeper" in found,
    )


def install(
    shell: HostConnection, facts: HostFacts, wheel: Wheel, extras: tuple[str, ...], python: str
) -> str:
    """Install a wheel in an environment of its own, if it is not there; return the path of its `serve`. Raises CommandFailed."""
    name = hashlib.sha256(f"{wheel.digest} {' '.join(extras)} {python}".encode()).hexdigest()[:12]
    folder = f"{BASE}/versions/{name}"
    serve = f"{facts.folder}/{folder}/venv/bin/serve"
    if not _is_there(shell, f"{folder}/complete"):
        shell.put(f"{folder}/{wheel.file_name}", wheel.content, timeout_s=300.0)
    wanted = f"versions/{name}/{wheel.file_name}" + (f"[{','.join(extras)}]" if extras else "")
    script = _INSTALL.format(
        base=BASE,
        digest=name,
        python=shlex.quote(python),
        requirement=shlex.quote(f"./{wanted}"),
        no_lock=_NO_LOCK,
    )
    try:
        shell.run(script, timeout_s=INSTALL_TIMEOUT_S)
    except CommandError as error:
        lines = error.output.said.splitlines()
        raise CommandFailed(
            f"{shell.login.name}: serve cannot be installed: {lines[-1] if lines else error.message}"
        ) from error
    return serve


def serve_there(
    shell: HostConnection,
    facts: HostFacts,
    serve: str,
    *arguments: str,
    stdin: bytes = b"",
    timeout_s: float = START_TIMEOUT_S,
    check: bool = True,
) -> CommandOutput:
    """Run a command of `serve` for the home there. Raises CommandFailed with its last line."""
    words = [serve, *arguments]
    script = f"umask 077; SKYSERVE_HOME={shlex.quote(facts.home)} exec {shlex.join(words)}"
    try:
        return shell.run(script, stdin=stdin, timeout_s=timeout_s, check=check)
    except CommandError as error:
        lines = error.output.said.splitlines()
        raise CommandFailed(
            f"{shell.login.name}: `serve {' '.join(arguments[:2])}` failed: {lines[-1] if lines else error.output.code}"
        ) from error


def missing_files(shell: HostConnection, paths: list[str]) -> list[str]:
    """Return the paths that the login there cannot read; ~ is its home directory."""
    script = 'while IFS= read -r path; do case $path in "~/"*) p="$HOME/${path#"~/"}";; *) p=$path;; esac; '
    script += '[ -r "$p" ] || printf "%s\\n" "$path"; done'
    out = shell.run(script, stdin="".join(f"{path}\n" for path in paths).encode()).out
    return out.decode().splitlines()


def unit_text(facts: HostFacts, serve: str) -> str:
    """Return the systemd unit. It ends the controller alone: load balancers and replicas beside it go on."""
    wanted_by = "multi-user.target" if facts.user == 0 else "default.target"
    settings: Mapping[str, str] = {
        "Environment": _quoted(f"SKYSERVE_HOME={facts.home}"),
        "ExecStart": f"{_quoted(serve)} controller start --foreground",
        "Restart": "on-failure",
        "RestartSec": "1",
        "RestartPreventExitStatus": "2 3 4",
        "KillMode": "process",
        "UMask": "0077",
    }
    service = "".join(f"{key}={value}\n" for key, value in settings.items())
    return (
        "[Unit]\nDescription=SkyServe controller\nWants=network-online.target\nAfter=network-online.target\n"
        f"StartLimitIntervalSec=0\n\n[Service]\n{service}\n[Install]\nWantedBy={wanted_by}\n"
    )


def start(shell: HostConnection, facts: HostFacts, serve: str) -> str:
    """Start the controller, or start it again with this `serve`; return what keeps it running. Raises CommandFailed."""
    if not facts.has_systemd:
        if facts.is_running:
            serve_there(shell, facts, serve, "controller", "stop")
        serve_there(shell, facts, serve, "controller", "start")
        return "keeper"
    if facts.has_keeper:
        serve_there(shell, facts, serve, "controller", "stop")
    folder = "/etc/systemd/system" if facts.user == 0 else f"{facts.folder}/.config/systemd/user"
    shell.put(f"{folder}/{facts.unit}.service", unit_text(facts, serve).encode(), mode=0o644)
    linger = "" if facts.user == 0 else f"loginctl enable-linger {shlex.quote(facts.login)}; "
    control = _systemctl(facts)
    script = (
        f"{linger}{control} daemon-reload && {control} enable {facts.unit} && {control} restart {facts.unit}"
    )
    _systemd(shell, script)
    return "systemd"


def stop(shell: HostConnection, facts: HostFacts, serve: str) -> bool:
    """Stop the controller for good; return whether it is certain that none runs. Raises CommandFailed or ShellError."""
    if facts.has_systemd:
        shell.run(f"{_systemctl(facts)} disable --now {facts.unit}", check=False, timeout_s=START_TIMEOUT_S)
    serve_there(shell, facts, serve, "controller", "stop", check=False)
    now = look(shell, facts.home)
    return not now.is_running and not now.has_keeper


def terminate_load_balancers(shell: HostConnection, home: str) -> None:
    """Send SIGTERM to the load balancers beside a controller of that home that was stopped. Raises ShellError.

    A process is one of them if the token file of a folder in the home is a word of its command line, as `AgentFolder` starts it.
    """
    shell.run(_TERMINATE.format(folder=shlex.quote(f"{home}/lb")), check=False)


_TERMINATE = """
folder=$(cd {folder} 2>/dev/null && pwd -P) || exit 0
for process in /proc/[0-9]*; do
  tr '\\0' '\\n' 2>/dev/null < "$process/cmdline" | while IFS= read -r word; do
    case $word in "$folder"/*/token) kill -TERM "${{process#/proc/}}";; esac
  done
done 2>/dev/null
"""


def _systemd(shell: HostConnection, script: str) -> None:
    try:
        shell.run(script, timeout_s=START_TIMEOUT_S)
    except CommandError as error:
        raise CommandFailed(f"{shell.login.name}: systemd: {error.output.said.splitlines()[-1]}") from error


def _systemctl(facts: HostFacts) -> str:
    if facts.user == 0:
        return "systemctl"
    return f"XDG_RUNTIME_DIR=/run/user/{facts.user} systemctl --user"


def _is_there(shell: HostConnection, path: str) -> bool:
    return shell.run(f"[ -e {shlex.quote(path)} ]", check=False).code == 0


def _quoted(word: str) -> str:
    """As one word of a unit's setting."""
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'
