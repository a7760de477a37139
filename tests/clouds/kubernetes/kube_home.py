"""The manifests of two controllers on the fake cluster: applied as they are, with their Secrets, and commands in the leader's Pod."""

from __future__ import annotations

import base64
import ipaddress
import os
import secrets
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.fernet import Fernet
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from skyserve_cli.controller.leader_label import CONTROLLERS, LABEL
from tests.clouds.kubernetes.kube_deployments import is_ready
from tests.clouds.kubernetes.kube_store import KINDS, Json
from tests.clouds.kubernetes.kube_world import NAMESPACE, KubeWorld

ROOT = Path(__file__).parents[3]
MANIFESTS = ROOT / "deploy" / "kubernetes" / "two-controllers"
_RESOURCES = {kind: resource for resource, (_, kind) in KINDS.items()}


class KubernetesHome:
    """`certificate` is the file with the certificate of the API, `url` that of its Service."""

    def __init__(self, world: KubeWorld, folder: Path, kubeconfig: Path, database: str) -> None:
        if os.geteuid() != 0:
            pytest.skip("only root can make the mount namespaces of its Pods")
        self.world = world
        assert world.kubelet is not None
        self.kubelet = world.kubelet
        self.kubelet.kubeconfig = kubeconfig
        self.certificate = folder / "tls.crt"
        self.database = database
        self.url = ""

    def apply(self, clouds: Json) -> None:
        """Make what the documentation says, with `clouds` in config.yaml. API calls are limited to the manifest's roles."""
        allowed = set()
        for body in self._documents():
            if body["kind"] in ("Role", "ClusterRole"):
                allowed |= {
                    (verb, resource)
                    for rule in body["rules"]
                    for resource in rule["resources"]
                    for verb in rule["verbs"]
                }
            if body["kind"] == "ConfigMap":
                config = yaml.safe_load(body["data"]["config.yaml"])
                body["data"]["config.yaml"] = yaml.safe_dump({**config, "clouds": clouds})
            made = self.world.create(_RESOURCES[body["kind"]], NAMESPACE, body)
            if body["metadata"]["name"] == "skyserve-api":
                self.url = f"https://{made['spec']['clusterIP']}:9443"
        self.world.troubles.allowed = frozenset(allowed)
        self._make_secrets()

    def pods(self, name: str = "skyserve-controller") -> list[Json]:
        found = self.world.store.list("pods", NAMESPACE)
        return [one for one in found if one["metadata"]["labels"].get("app.kubernetes.io/name") == name]

    def leader(self) -> Json | None:
        """Return the Pod to which the Service of the API leads; None while there is none, or more than one."""
        found = [
            one for one in self.pods() if is_ready(one) and one["metadata"]["labels"].get(LABEL) == "true"
        ]
        return found[0] if len(found) == 1 else None

    def is_up(self) -> bool:
        """Return whether two controllers are ready, of which one leads."""
        assert all(CONTROLLERS.items() <= one["metadata"]["labels"].items() for one in self.pods())
        return sum(map(is_ready, self.pods())) == 2 and self.leader() is not None

    def execute(self, pod: Json, *words: str) -> str:
        """As `kubectl exec` does: run a command in a controller's Pod."""
        home = self.kubelet.root / "pods" / pod["metadata"]["uid"] / "volumes" / "home" / "home"
        environment = {**os.environ, "SKYSERVE_HOME": str(home), "SKYSERVE_DB": self.database}
        command = [sys.executable, "-m", "skyserve_cli", *words]
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def kill(self, pod: Json) -> None:
        """Kill the process of a controller. Its container is started again."""
        os.kill(self.kubelet.running[pod["metadata"]["uid"], "controller"].process.pid, signal.SIGKILL)

    def restarts(self, pod: Json) -> int:
        """Return how often the container of a controller was started again."""
        found = self.world.store.get("pods", NAMESPACE, pod["metadata"]["name"])
        return int(found["status"]["containerStatuses"][0]["restartCount"])

    def lose(self, pod: Json) -> None:
        """The Pod is gone without a word."""
        self.world.lose(pod["metadata"]["name"])

    def log(self) -> str:
        return "\n".join(path.read_text() for path in self.kubelet.root.glob("pods/*/controller.out"))

    # --- inside

    def _documents(self) -> list[Json]:
        listed = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())["resources"]
        texts = [(MANIFESTS / name).read_text() for name in listed]
        replaced = [text.replace("namespace: skyserve", f"namespace: {NAMESPACE}") for text in texts]
        return [one for text in replaced for one in yaml.safe_load_all(text) if one]

    def _make_secrets(self) -> None:
        key, certificate = _certificate(self.url.split("/")[2].split(":")[0])
        self.certificate.write_bytes(certificate)
        keys = {
            "sealing.key": Fernet.generate_key(),
            "machines.key": secrets.token_bytes(32),
            "metrics.token": secrets.token_hex(32).encode(),
        }
        for name, data in (
            ("skyserve-keys", keys),
            ("skyserve-database", {"url": self.database.encode()}),
            ("skyserve-api-tls", {"tls.crt": certificate, "tls.key": key}),
        ):
            encoded = {one: base64.b64encode(content).decode() for one, content in data.items()}
            body: dict[str, Any] = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}
            self.world.create("secrets", NAMESPACE, {**body, "data": encoded})


def _certificate(address: str) -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "skyserve-api")])
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(pem, *plain), made.public_bytes(pem)
