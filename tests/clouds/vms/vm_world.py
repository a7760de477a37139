"""Machines that really boot, without a hypervisor: each is a set of namespaces of this machine.

A machine has its own network (an address, and 169.254.169.254 with its cloud's metadata service), processes, mounts and
host name; its disk is a tmpfs of a given size over this machine's root and /dev/shm, so programs and files of tests are there
and nothing that it writes is left. What it needs from this checkout is copied to that disk: its users need not be able to read the checkout, which
may be in a folder of root's own. It boots like one: after `boot_s` sshd comes up with the host key of its image, then the user data runs as
root, and `shutdown` ends it. Ending its first process is the end of all, as if the power had gone.

A machine exists no longer than the test: its power is a pipe that the test holds. The remains of a test that was killed
(a namespace, interfaces, an empty folder) is removed by the next one: worlds have names and locks, and whatever carries
the name of a world that no one has a lock of is swept. Needs root, `ip`, `unshare`, overlayfs and sshd.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from threading import Event, RLock, Thread

from tests.clouds.vms.vm_metadata import Metadata
from tests.clouds.vms.wheels import copy_installed
from tests.kit.own_number import SHARED

_ROOT = SHARED / "skyserve-vms"
_NETWORKS = [IPv4Network(f"10.215.{number}.0/24") for number in range(64)]
_PREFIX = "skv"
_WAIT_S = 300.0
_ALL_PROTOCOLS = 3
_WALL = 1000  # the first of the preferences of a machine's firewall

_POWER = """exec 3<&0
"$@" & machine=$!
{ read -r off <&3; kill -9 $machine; } &
wait $machine
kill $!
"""

_BEFORE_INIT = """set -e
umask 022
cd {folder}
chmod -R a+rX files
mount --make-rprivate /
hostname {name}
mount -t tmpfs -o size={disk_mb}m tmpfs disk
mkdir disk/upper disk/work disk/root disk/shm disk/shm-work
chmod 1777 disk/shm
mount -t overlay overlay -o lowerdir=/,upperdir=disk/upper,workdir=disk/work disk/root
root=$PWD/disk/root
mount --rbind /dev $root/dev
mount -t overlay overlay -o lowerdir=/dev/shm,upperdir=disk/shm,workdir=disk/shm-work $root/dev/shm
mount -t tmpfs tmpfs $root/run
mount -t proc proc $root/proc
mount -t sysfs -o ro sysfs $root/sys 2>/dev/null || true
mkdir -p $root/run/sshd
cp -a files/. $root/
exec chroot $root /sbin/vm-init
"""

_INIT = """#!/bin/sh
exec >/run/console.log 2>&1
trap 'exit 0' TERM
echo "127.0.1.1 $(hostname)" >>/etc/hosts  # as on every machine of a cloud: sudo waits for a name that nobody knows
rm -f /etc/ssh/ssh_host_*; ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key
sleep {boot_s} & wait $!
sh /run/users.sh
# Whoever looks after sshd starts it again, unless it is to stay away.
while [ ! -e /run/no-sshd ]; do /usr/sbin/sshd -D -e; echo "sshd ended with $?"; sleep 0.2; done &
if [ -s /run/user-data ]; then
  sleep {user_data_after_s} & wait $!
  echo "user data begins"
  /run/user-data
  echo "user data ended with $?"
fi &
while :; do wait; sleep 3600 & wait $!; done
"""

_SSHD_CONFIG = """Port 22
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
MaxStartups 100
Subsystem sftp internal-sftp
"""


@cache
def why_not() -> str | None:
    """Why machines cannot be booted here, or None."""
    if os.geteuid() != 0:
        return "booting machines needs root"
    missing = [
        name for name in ("ip", "unshare", "nsenter", "sshd", "ssh-keygen") if shutil.which(name) is None
    ]
    if missing:
        return f"booting machines needs {', '.join(missing)} (iproute2, util-linux, openssh-server)"
    try:
        with VmWorld() as world:
            world.boot("trial")
    except (OSError, subprocess.CalledProcessError, AssertionError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
        return f"machines cannot be booted here: {error} {said}"
    return None


@dataclass(slots=True)
class Vm:
    """One machine. `address` is its first one."""

    name: str
    address: str
    namespace: str
    folder: Path
    metadata: Metadata
    power: subprocess.Popen[bytes] = field(repr=False)

    @property
    def is_running(self) -> bool:
        return self.power.poll() is None

    def run(self, script: str, check: bool = True) -> str:
        """A script in the machine, as root, without ssh; what it printed."""
        inside = [
            "nsenter",
            f"--target={self._init()}",
            "--mount",
            "--pid",
            "--net",
            "--uts",
            "--root",
            "--wd",
        ]
        done = subprocess.run([*inside, "/bin/sh", "-c", script], capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, (
            f"{script!r} failed on {self.name}: {done.stdout}{done.stderr}"
        )
        return done.stdout

    def console(self) -> str:
        return self.run("cat /run/console.log")

    def await_end(self, timeout_s: float = 60.0) -> None:
        """Until it has ended by itself."""
        self.power.wait(timeout_s)

    def freeze(self) -> None:
        """It falls silent, without a word: its network is gone."""
        _ip(f"link set {self.namespace} down")

    def thaw(self) -> None:
        _ip(f"link set {self.namespace} up")

    def wall(self, openings: Iterable[tuple[int, str]]) -> None:
        """From now on only these (port, CIDR block) can be opened from outside, by TCP. The kernel's policy routing drops the
        rest, which needs no program that is not there anyway. Again replaces."""
        numbered = enumerate(sorted(openings), start=_WALL + 1)
        rules = [
            f"rule add pref {number} iif eth0 from {block} ipproto tcp dport {port} lookup local"
            for number, (port, block) in numbered
        ]
        # Loopback and what this machine has opened itself: by the ephemeral ports that its connections come back to.
        low, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        rules.append(f"rule add pref {_WALL + 900} iif eth0 ipproto tcp dport 1-{int(low) - 1} blackhole")
        rules.append(f"rule add pref {_WALL + 1000} lookup local")
        # All at once would be better; but an address that is let in before and after is let in at each moment between.
        shown = subprocess.run(
            ["ip", "-n", self.namespace, "rule"], capture_output=True, text=True, check=True
        ).stdout
        old = [line.partition(":")[0] for line in shown.splitlines()]
        _ip(f"rule add pref {_WALL} lookup local", self.namespace)
        olds = [f"rule del pref {number}" for number in old if int(number) < 32000 and int(number) != _WALL]
        _ip("\n".join(olds), self.namespace)
        _ip("\n".join([*rules, f"rule del pref {_WALL}"]), self.namespace)

    @contextmanager
    def tapped(self) -> Iterator[bytearray]:
        """Everything that crosses the machine's wire, both ways, as it comes."""
        heard, over = bytearray(), Event()
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) as tap:
            tap.bind((self.namespace, 0))
            tap.settimeout(0.1)

            def listen() -> None:
                while not over.is_set():
                    with suppress(TimeoutError):
                        heard.extend(tap.recv(65536))

            listener = Thread(target=listen, daemon=True)
            listener.start()
            try:
                yield heard
            finally:
                over.set()
                listener.join(10)

    def kill(self) -> None:
        """The power goes. Again is nothing new."""
        self.metadata.stop()
        if self.power.stdin is not None:
            self.power.stdin.close()
        self.power.wait(30)
        _remove(self.namespace, self.folder)

    def _init(self) -> int:
        """Our number of its first process."""
        until = time.monotonic() + 30
        while time.monotonic() < until and self.is_running:
            for pid in _pids(self.namespace):
                with suppress(OSError):
                    status = Path(f"/proc/{pid}/status").read_text()
                    numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[
                        1:
                    ]
                    has_booted = "console.log" in str(Path(f"/proc/{pid}/fd/1").readlink())
                    if numbers[-1] == "1" and len(numbers) > 1 and has_booted:
                        return pid
            time.sleep(0.01)
        raise AssertionError(f"{self.name} does not run")


class VmWorld:
    """A network and the machines on it, which see each other and this machine and nothing else.

    Without a `network` it takes one that no other world has. A cloud's fake that gives out addresses of its own names
    the network that they are from, and then one world at a time has it: others wait.
    """

    def __init__(self, network: str | None = None) -> None:
        self.vms: dict[str, Vm] = {}
        self._guard = RLock()
        self._booted = 0
        self.network, self._lock = _take([IPv4Network(network)] if network else _NETWORKS)
        self._key = _key(self.network)
        self._bridge = f"{_PREFIX}b{self._key}"
        _sweep(self._key)
        for path in _ROOT.glob("*.lock"):
            _sweep_if_free(path)
        self.gateway = str(self.network[1])
        _ip(f"link add {self._bridge} type bridge\naddress add {self.gateway}/32 dev {self._bridge}")
        _ip(f"link set {self._bridge} up")

    def allocate(self) -> str:
        """The next free address."""
        with self._guard:
            self._booted += 1
            return str(IPv4Address(int(self.network[9]) + self._booted))

    def boot(
        self,
        name: str,
        *,
        addresses: Sequence[str] = (),
        cloud: str = "aws",
        user_data: str = "",
        logins: Mapping[str, str] | None = None,
        boot_s: float = 0.0,
        user_data_after_s: float = 0.0,
        disk_mb: int = 512,
        gpus: int = 0,
        libraries: Sequence[str] = (),
        wheels: Path | None = None,
    ) -> Vm:
        """Boot a machine; returns at once. `logins` are the users that its cloud makes, with their public keys.
        `libraries` are the names of distributions that its Python has, with all that they need; `wheels` is the folder that
        its pip installs from."""
        addresses = list(addresses) or [self.allocate()]
        with self._guard:
            number = len(self.vms)
            namespace = f"{_PREFIX}{self._key}x{number}"
            folder = _ROOT / self._key / str(number)
            files = folder / "files"
            (folder / "disk").mkdir(parents=True)
            self._write(files, user_data, logins or {}, gpus, boot_s, user_data_after_s)
            if libraries:
                copy_installed(files / python_site(), libraries)
            if wheels is not None:
                shutil.copytree(wheels, files / "opt" / "wheels")
                (files / "etc" / "pip.conf").write_text(
                    "[global]\nno-index = true\nfind-links = /opt/wheels\n"
                )
            _ip(
                f"netns add {namespace}\n"
                f"link add {namespace} type veth peer name eth0 netns {namespace}\n"
                f"link set {namespace} master {self._bridge} up"
            )
            _ip(
                "link set lo up\naddress add 169.254.169.254/32 dev lo\nlink set eth0 up\n"
                + "".join(f"address add {address}/32 dev eth0\n" for address in addresses)
                + "route add default dev eth0",
                namespace,
            )
            _ip("\n".join(f"route add {address}/32 dev {self._bridge}" for address in addresses))
            metadata = Metadata(cloud, name)
            metadata.start(namespace)
            inner = _BEFORE_INIT.format(folder=folder, name=name, disk_mb=disk_mb)
            machine = ["ip", "netns", "exec", namespace, "unshare", "-m", "-p", "-f", "--kill-child", "--uts"]
            power = subprocess.Popen(
                ["sh", "-c", _POWER, "power", *machine, "sh", "-c", inner],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=(folder / "power.err").open("wb"),
                start_new_session=True,
                env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"},
            )
            vm = Vm(name, addresses[0], namespace, folder, metadata, power)
            self.vms[name] = vm
        return vm

    def close(self) -> None:
        for vm in self.vms.values():
            vm.kill()
        _ip(f"link delete {self._bridge}", check=False)
        shutil.rmtree(_ROOT / self._key, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> VmWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(
        self, files: Path, user_data: str, logins: Mapping[str, str], gpus: int, boot_s: float, after_s: float
    ) -> None:
        """What the machine's image has, beside this machine's root."""
        users = "".join(
            f"id {user} >/dev/null 2>&1 || useradd -m -s /bin/bash -p '*' {user}\n"
            f"h=$(getent passwd {user} | cut -d: -f6); mkdir -p $h/.ssh; chmod 700 $h/.ssh\n"
            f"echo '{key}' >$h/.ssh/authorized_keys; chown -R {user} $h/.ssh\n"
            for user, key in logins.items()
        )
        texts = {
            "sbin/vm-init": _INIT.format(boot_s=boot_s, user_data_after_s=after_s),
            "sbin/shutdown": "#!/bin/sh\nkill -TERM 1\n",
            "run/users.sh": users,
            "run/user-data": user_data,
            "etc/ssh/sshd_config": _SSHD_CONFIG,
        }
        if gpus:
            lines = "".join(f"echo {number}\n" for number in range(gpus))
            texts["bin/nvidia-smi"] = f"#!/bin/sh\n{lines}"
        for path, text in texts.items():
            target = files / path.replace("sbin/", "usr/sbin/", 1).replace("bin/nv", "usr/bin/nv", 1)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            target.chmod(0o755)


@cache
def python_site() -> str:
    """Where the machine's Python looks for modules that its administrator has installed."""
    script = "import sysconfig; print(sysconfig.get_path('purelib', 'posix_local'))"
    python = "/usr/bin/python3"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.strip().lstrip("/").replace("site-packages", "dist-packages")


@cache
def why_other_python() -> str | None:
    """Why a machine's Python cannot load the libraries that are installed for this process, or None."""
    version = _python("import sys; print(sys.version_info[:2])")
    if version == str(sys.version_info[:2]):
        return None
    return f"a machine's Python (/usr/bin/python3) is {version or 'missing'}, ours is {sys.version_info[:2]}"


@cache
def why_no_venv() -> str | None:
    """Why a machine's Python cannot make the environment that this process runs in, or None."""
    if _python("import ensurepip; print(True)") is None:
        return "/usr/bin/python3 is not there, or has no venv (python3-venv)"
    return why_other_python()


def _python(script: str) -> str | None:
    """What a machine's Python prints; None if it fails or is not there."""
    with suppress(OSError):
        done = subprocess.run(["/usr/bin/python3", "-c", script], capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout.strip()
    return None


def _take(networks: Sequence[IPv4Network]) -> tuple[IPv4Network, int]:
    """The first network that no one has, and its lock."""
    _ROOT.mkdir(exist_ok=True)
    until = time.monotonic() + _WAIT_S
    while time.monotonic() < until:
        for network in networks:
            fd = os.open(_ROOT / f"{_key(network)}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
            else:
                return network, fd
        time.sleep(0.1)
    raise AssertionError(f"another test has had {networks} for too long")


def _key(network: IPv4Network) -> str:
    return f"{int(network.network_address) >> 8:06x}"


def _sweep_if_free(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _sweep(path.stem)
    except OSError:
        return  # someone has it
    finally:
        os.close(fd)


def _sweep(key: str) -> None:
    """What a test that was killed has left of its world. With its lock held."""
    folder = _ROOT / key
    for path in sorted(Path("/run/netns").glob(f"{_PREFIX}{key}x*")) if Path("/run/netns").is_dir() else []:
        for pid in _pids(path.name):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        _remove(path.name, folder)
    shutil.rmtree(folder, ignore_errors=True)
    if Path(f"/sys/class/net/{_PREFIX}b{key}").exists():
        _ip(f"link delete {_PREFIX}b{key}", check=False)


def _remove(namespace: str, folder: Path) -> None:
    if Path(f"/sys/class/net/{namespace}").exists():
        _ip(f"link delete {namespace}", check=False)
    if Path(f"/run/netns/{namespace}").exists():
        _ip(f"netns delete {namespace}", check=False)
    shutil.rmtree(folder, ignore_errors=True)


def _pids(namespace: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    return [int(word) for word in done.stdout.split()]


def _ip(commands: str, namespace: str | None = None, check: bool = True) -> None:
    inside = ["-n", namespace] if namespace else []
    subprocess.run(
        ["ip", *inside, "-batch", "-"], input=commands + "\n", text=True, capture_output=True, check=check
    )
