"""A real control plane on loopback: etcd, kube-apiserver, kube-scheduler, kube-controller-manager, with RBAC and certificates.

The programs are those of the folder that SKYSERVE_KUBE_BIN names, whichever version they are: a flag that only some versions have
is given to those that take it.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

import urllib3
import yaml

from tests.clouds.kubernetes.kube_store import SERVICE_NET, Refused
from tests.kubernetes_real.certificates import Authority, write_token_keys
from tests.kubernetes_real.real_api import Json, RealApi

VARIABLE = "SKYSERVE_KUBE_BIN"
PROGRAMS = ("kube-apiserver", "kube-scheduler", "kube-controller-manager")
_START_S = 120.0
_STOP_S = 5.0  # the API server waits for its watches, which do not end by themselves
_LOOK_S = 0.1


def why_not() -> str | None:
    """Return why there can be no real cluster; None if there can."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return f"{VARIABLE} names no folder with kube-apiserver (scripts/real_kubernetes.sh makes one)"
    absent = [name for name in PROGRAMS if not (Path(folder) / name).exists()]
    if absent:
        return f"{VARIABLE}={folder} has no {', '.join(absent)}"
    return None if _etcd(Path(folder)) else f"there is no etcd in the path or in {folder}"


def until(
    holds: Callable[[], object],
    what: str | Callable[[], object],
    within_s: float = 60.0,
    look_s: float = _LOOK_S,
) -> float:
    """Wait until it holds; return the seconds that it took. Raises AssertionError with `what` after the time."""
    began = monotonic()
    while not holds():
        if monotonic() - began > within_s:
            raise AssertionError(f"after {within_s:.0f} s: {what if isinstance(what, str) else what()}")
        sleep(look_s)
    return monotonic() - began


class Context(NamedTuple):
    """A namespace, what identifies its user, and the port of a relay to the server."""

    namespace: str
    user: Json
    port: int | None = None


class Program:
    """A program of the control plane, which can be stopped, started again, and held."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as stream:
            self._process = subprocess.Popen(
                self._command, stdout=stream, stderr=stream, start_new_session=True
            )

    def hold(self) -> None:
        """It does nothing until `go_on`; its sockets stay open."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is None:
            return
        self.go_on()
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process = None

    def check(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            last = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise AssertionError(f"{self._command[0]} has ended:\n{last}")

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


class ControlPlane:
    """`folder` gets all state. `api` is for its administrator."""

    def __init__(self, folder: Path, binaries: Path) -> None:
        self.folder = folder
        self._etcd_url, peer, port = _loopback(), _loopback(), _port()
        self.url = f"https://127.0.0.1:{port}"
        self._make_identities()
        self.api = RealApi(self.url, folder)
        etcd = _etcd(binaries)
        assert etcd is not None
        self.etcd = self._program([etcd, *_etcd_flags(etcd, folder, self._etcd_url, peer)])
        self.server = self._program([str(binaries / PROGRAMS[0]), *self._server_flags(binaries, port)])
        self.controllers = [self._program(each) for each in self._controllers(binaries)]
        self.version: Json = {}

    @property
    def release(self) -> str:
        return str(self.version.get("gitVersion", "unknown"))

    @property
    def minor(self) -> int:
        """The release is 1.`minor`; 0 if that is not known."""
        return int(str(self.version.get("minor", "")).rstrip("+") or 0)

    def start(self) -> None:
        self.etcd.start()
        until(self._has_etcd, "etcd does not respond", _START_S)
        self.start_server()
        self.version = self.api.call("GET", "version")
        for one in self.controllers:
            one.start()

    def start_server(self) -> float:
        """Start the API server; return after how many seconds it was ready."""
        self.server.start()
        return until(self.is_ready, "the API server is not ready", _START_S)

    def is_ready(self) -> bool:
        self.server.check()
        with suppress(Refused, OSError, urllib3.exceptions.HTTPError):
            return self.api.call("GET", "readyz").get("text") == "ok"
        return False

    def stop(self) -> None:
        for one in (*self.controllers, self.server, self.etcd):
            one.stop()

    def check(self) -> None:
        """Raise AssertionError if one of the programs has ended by itself."""
        for one in (*self.controllers, self.server, self.etcd):
            one.check()

    def compact(self) -> int:
        """Forget all earlier versions in etcd: what wants to go on from one has to list again. Return the revision."""
        key = base64.b64encode(b"/registry").decode()
        found = self._ask_etcd("kv/range", {"key": key})
        revision = int(found["header"]["revision"])
        self._ask_etcd("kv/compaction", {"revision": revision, "physical": True})
        return revision

    def kubeconfig(self, name: str, contexts: Mapping[str, Context]) -> Path:
        """Write a kubeconfig with contexts of one user each; the first is the current one."""
        authority = str(self.folder / "ca.crt")
        found = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": key,
                    "cluster": {
                        "server": self.url if one.port is None else f"https://127.0.0.1:{one.port}",
                        "certificate-authority": authority,
                    },
                }
                for key, one in contexts.items()
            ],
            "users": [{"name": key, "user": one.user} for key, one in contexts.items()],
            "contexts": [
                {"name": key, "context": {"cluster": key, "user": key, "namespace": one.namespace}}
                for key, one in contexts.items()
            ],
            "current-context": next(iter(contexts)),
        }
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(yaml.safe_dump(found))
        return path

    def certificate_of(self, name: str) -> Json:
        """Return what identifies one who has a certificate, for `kubeconfig`."""
        return {
            "client-certificate": str(self.folder / f"{name}.crt"),
            "client-key": str(self.folder / f"{name}.key"),
        }

    # --- inside

    def _program(self, command: Sequence[str]) -> Program:
        return Program(command, self.folder / f"{Path(command[0]).name}.log")

    def _make_identities(self) -> None:
        authority = Authority(self.folder)
        authority.issue("server", "kube-apiserver")
        authority.issue("kubelet", "kubelet")
        authority.issue("admin", "admin", "system:masters")
        for name in PROGRAMS[1:]:
            authority.issue(name, f"system:{name}")
        write_token_keys(self.folder)

    def _server_flags(self, binaries: Path, port: int) -> list[str]:
        at, tokens = self.folder, "https://kubernetes.default.svc"
        needed = [
            f"--etcd-servers={self._etcd_url}",
            f"--secure-port={port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",  # it would make an Endpoints object of a loopback address
            f"--tls-cert-file={at}/server.crt",
            f"--tls-private-key-file={at}/server.key",
            f"--client-ca-file={at}/ca.crt",
            f"--service-account-key-file={at}/tokens.pub",
            f"--service-account-signing-key-file={at}/tokens.key",
            f"--service-account-issuer={tokens}",
            f"--service-cluster-ip-range={SERVICE_NET}.0.0/16",  # where the hollow kubelet can listen
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--kubelet-client-certificate={at}/admin.crt",
            f"--kubelet-client-key={at}/admin.key",
            f"--kubelet-certificate-authority={at}/ca.crt",
        ]
        return needed + _taken(binaries / PROGRAMS[0], "--insecure-port=0")

    def _controllers(self, binaries: Path) -> Iterator[list[str]]:
        for name in PROGRAMS[1:]:
            own = self.kubeconfig(name, {"real": Context("default", self.certificate_of(name))})
            command = [
                str(binaries / name),
                f"--kubeconfig={own}",
                f"--authentication-kubeconfig={own}",
                f"--authorization-kubeconfig={own}",
                "--leader-elect=false",
                "--bind-address=127.0.0.1",
                f"--secure-port={_port()}",
                *_taken(binaries / name, "--port=0"),
            ]
            if name == "kube-controller-manager":
                command += [
                    f"--service-account-private-key-file={self.folder}/tokens.key",
                    f"--root-ca-file={self.folder}/ca.crt",
                    "--use-service-account-credentials=true",
                ]
            yield command

    def _has_etcd(self) -> bool:
        self.etcd.check()
        with suppress(OSError, urllib3.exceptions.HTTPError):
            return b"true" in urllib3.request("GET", f"{self._etcd_url}/health", retries=False).data
        return False

    def _ask_etcd(self, path: str, body: Json) -> Json:
        response = urllib3.request("POST", f"{self._etcd_url}/v3/{path}", json=body, timeout=60.0)
        assert response.status == 200, response.data
        found: Json = response.json()
        return found


@contextmanager
def control_plane(folder: Path) -> Iterator[ControlPlane]:
    """A control plane that has started. All of its processes are ended in the end, whatever happens."""
    made = ControlPlane(folder, Path(os.environ[VARIABLE]))
    try:
        made.start()
        yield made
    finally:
        made.stop()


def _taken(program: Path, *flags: str) -> list[str]:
    """Return those of the flags that the program knows: it refuses to print its version with others."""
    return [
        flag
        for flag in flags
        if subprocess.run([program, flag, "--version"], capture_output=True, check=False).returncode == 0
    ]


def _etcd(folder: Path) -> str | None:
    own = folder / "etcd"
    return str(own) if own.exists() else shutil.which("etcd")


def _etcd_flags(etcd: str, folder: Path, url: str, peer: str) -> list[str]:
    return [
        f"--data-dir={folder / 'etcd-data'}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peer}",
        *_taken(Path(etcd), "--unsafe-no-fsync"),
    ]


def _loopback() -> str:
    return f"http://127.0.0.1:{_port()}"


def _port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
