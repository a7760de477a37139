"""`serve controller deploy kubernetes/…`, step by step. Every step looks first, so a second run completes the first one or upgrades it.

Objects are written by server-side apply: what is as it should be is not changed, and fields that others have set stay.
"""

from __future__ import annotations

import base64
import copy
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from provisioners.port.errors import AuthError, ProvisionError
from skyserve_cli.controller.api.client import AWAY, ControllerClient, RefusedError
from skyserve_cli.controller.api.remote import POD_HOME, Contexts, KubernetesPlace, Remote
from skyserve_cli.controller.leader_label import CONTROLLERS
from skyserve_cli.controller.reconcile.clock import SteadyClock, SystemClock
from skyserve_cli.deployment import cluster_objects as manifests
from skyserve_cli.deployment.cluster_objects import ClusterValues, Json, Right
from skyserve_cli.deployment.cluster_pods import is_rolled_out, obstacle, progress
from skyserve_cli.home import MACHINE_SECRET_BYTES, Home
from skyserve_cli.output import CommandFailed, WrongUsage

if TYPE_CHECKING:
    from provisioners.kubernetes.api import KubeApi

POLL_S = 0.5
ACCOUNT_S = 10.0  # in which a new namespace gets its service account
_PODS: Mapping[str, Any] = {"clouds": {"kubernetes": {}}}  # of the namespace of the controller


class ClusterTarget(NamedTuple):
    """A namespace of a cluster; `kubeconfig` "" is the default one."""

    context: str
    namespace: str
    kubeconfig: str

    @property
    def remote(self) -> Remote:
        url = KubernetesPlace(self.context, self.namespace).url()
        return Remote(url, "", home=POD_HOME, kubeconfig=self.kubeconfig)

    def api(self) -> KubeApi:
        from provisioners.kubernetes.api import KubeApi, client_of  # an extra

        return KubeApi(self.context, self.namespace, lambda: client_of(self.context, self.kubeconfig or None))


class ClusterOptions(NamedTuple):
    """What the command line has; an empty value leaves what is there."""

    context: str
    image: str = ""
    storage_class: str = ""
    database_secret: str = ""
    config: Mapping[str, Any] | None = None
    has_cluster_role: bool = True
    timeout_s: float = 300.0


def target_of(name: str, kubeconfig: str) -> ClusterTarget:
    """Return what kubernetes[/CONTEXT[/NAMESPACE]] names. Raises WrongUsage, or AuthError without a kubeconfig.

    The namespace is that of the context, or else `skyserve`.
    """
    try:
        from provisioners.kubernetes.contexts import contexts_of
    except ImportError:
        raise WrongUsage(
            f"{name}: the Kubernetes client is not installed; install the extra kubernetes"
        ) from None

    known = contexts_of(kubeconfig or None)
    chosen = name.partition("/")[2].rstrip("/") or known.current
    context, _, namespace = (chosen, "", "") if chosen in known.namespaces else chosen.rpartition("/")
    if context not in known.namespaces:
        listed = ", ".join(known.namespaces) or "none"
        raise WrongUsage(f"{name}: the kubeconfig has no context {context or chosen} (it has: {listed})")
    found = ClusterTarget(context, namespace or known.namespaces[context] or "skyserve", kubeconfig)
    try:
        KubernetesPlace.of(found.remote.url)
    except ValueError:
        raise WrongUsage(f"{name}: {found.namespace!r} is no name of a namespace") from None
    return found


class ClusterDeployment:
    """A deployment to one namespace. `report` shows what happens."""

    def __init__(
        self, home: Home, target: ClusterTarget, options: ClusterOptions, report: Callable[[str], None]
    ) -> None:
        self.home = home
        self.target = target
        self.options = options
        self.report = report
        self.api = target.api()

    def run(self) -> dict[str, Any]:
        """Have a controller there that runs as the options say, and a context for it. Raises CommandFailed or ProvisionError."""
        self._insist_on_version()
        self._insist_on_rights()
        # Who may not write events cannot grant it, and nothing depends on them.
        values = self._values()._replace(has_events=may(self.api, manifests.Right("create", "", "events")))
        wanted = manifests.objects(values)
        has_namespace = self._has_namespace()
        self._insist_on_admission(wanted, has_namespace=has_namespace)
        if not has_namespace:
            self._make_namespace()
            self._insist_on_admission(
                wanted, has_namespace=True, changed="nothing was changed but that it was made"
            )
        self._make_secrets(values)
        changes = self._apply(wanted)
        self._await_pods()
        health = self._await_health()
        self._add_context()
        return {
            "cluster": self.target.context,
            "namespace": self.target.namespace,
            "image": values.image,
            "controllers": 2 if values.database_secret else 1,
            "version": health["version"],
            "changed": changes,
        }

    # --- what is there

    def _insist_on_rights(self) -> None:
        """Raise CommandFailed with what is missing, before anything is changed."""
        some = ClusterValues(self.target.namespace, "any", {}, has_cluster_role=self.options.has_cluster_role)
        databases = ("", "any")  # either variant may be there
        needed = {
            right: None
            for one in databases
            for right in manifests.rights(manifests.objects(some._replace(database_secret=one)))
        }
        missing = [right for right in needed if not may(self.api, right)]
        if not missing:
            return
        advice = ""
        if all(right.is_cluster_wide for right in missing):
            advice = "; --no-cluster-role does without (docs/howto/run-on-kubernetes.md)"
        raise CommandFailed(
            f"{self.target.context} does not allow you to {', '.join(map(str, missing))} "
            f"(namespace {self.target.namespace}); nothing was changed{advice}"
        )

    def _insist_on_version(self) -> None:
        from provisioners.kubernetes.check import too_old

        wrong = too_old(self.api.version())
        if wrong:
            raise CommandFailed(f"{self.target.context}: the server's version: {wrong}; nothing was changed")

    def _insist_on_admission(
        self, wanted: Sequence[Json], *, has_namespace: bool, changed: str = "nothing was changed"
    ) -> None:
        """Raise CommandFailed with what the cluster would refuse, before anything is changed."""
        found = list(refusals(self.api, wanted, has_namespace=has_namespace))
        if found:
            raise CommandFailed(
                f"{self.target.context} would refuse (namespace {self.target.namespace}): {'; '.join(found)}; {changed}"
            )

    def _values(self) -> ClusterValues:
        """Return the values of the options, and else those of what is there. Raises WrongUsage."""
        options = self.options
        deployment = self.api.find("deployment", manifests.DEPLOYMENT)
        config = self.api.find("config_map", manifests.CONFIG_MAP)
        volume = self.api.find("persistent_volume_claim", manifests.VOLUME)
        if deployment is not None and "meta.helm.sh/release-name" in _notes(deployment):
            raise WrongUsage(
                f"the controller in {self.target.namespace} was installed by Helm; upgrade it with helm"
            )
        image, database = _image(deployment), _database(deployment)
        if not (options.image or image):
            raise WrongUsage(
                "--image: name the controller's image, which packaging/Containerfile builds (docs/howto/run-on-kubernetes.md)"
            )
        if deployment is not None and bool(database) != bool(options.database_secret or database):
            raise WrongUsage(
                "--database-secret: the controller there has its state on a volume, which would stay behind; "
                "use another namespace"
            )
        storage = "" if volume is None else str(volume["spec"].get("storageClassName") or "")
        if volume is not None and options.storage_class not in ("", storage):
            raise WrongUsage(
                f"--storage-class: the volume there has the class {storage or 'of the cluster'}, which cannot be changed"
            )
        added = options.config
        if added is None:
            added = _PODS if config is None else yaml.safe_load(config["data"]["config.yaml"])
        return ClusterValues(
            self.target.namespace,
            options.image or image,
            added,
            options.storage_class or storage,
            options.database_secret or database,
            options.has_cluster_role,
        )

    # --- what is changed

    def _has_namespace(self) -> bool:
        try:
            return self.api.find("namespace", self.target.namespace) is not None
        except AuthError:  # who may not look at namespaces has been given one
            return True

    def _make_namespace(self) -> None:
        self.report(f"creating the namespace {self.target.namespace}")
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.target.namespace}}
        self._create("namespace", body)
        clock = SteadyClock()
        ends_at = clock.now() + ACCOUNT_S
        while self.api.find("service_account", "default") is None and clock.now() < ends_at:
            time.sleep(POLL_S)  # no Pod is admitted before

    def _make_secrets(self, values: ClusterValues) -> None:
        """Have the Secrets that the manifests name; those that are there are never changed. Raises WrongUsage."""
        now = SystemClock().now()
        self._make_secret(manifests.TLS, lambda: certificate(values.namespace, now), "kubernetes.io/tls")
        if not values.database_secret:
            return
        database = self.api.find("secret", values.database_secret)
        if database is None or "url" not in (database.get("data") or {}):
            raise WrongUsage(
                f"--database-secret: {values.namespace} has no Secret {values.database_secret} with a key `url`; "
                "make it first, with the URL of a PostgreSQL"
            )
        self._make_secret(manifests.KEYS, new_keys)

    def _make_secret(self, name: str, make: Callable[[], Mapping[str, bytes]], kind: str = "Opaque") -> None:
        if self.api.find("secret", name) is not None:
            return
        self.report(f"creating the Secret {name}")
        data = {key: base64.b64encode(value).decode() for key, value in make().items()}
        body = {"apiVersion": "v1", "kind": "Secret", "type": kind, "metadata": {"name": name}, "data": data}
        self._create("secret", body)

    def _create(self, kind: str, body: Json) -> None:
        from provisioners.kubernetes.api import ConflictError

        with suppress(ConflictError):  # another command was faster
            self.api.create(kind, body)

    def _apply(self, wanted: Sequence[Json]) -> list[str]:
        """Write the objects; return those that were created or changed."""
        changed = []
        for body in wanted:
            kind, name = manifests.kind_of(body), body["metadata"]["name"]
            before = self.api.find(kind, name)
            if before is not None and kind == "persistent_volume_claim":
                continue  # it cannot be changed
            try:
                now = self.api.apply(kind, body)
            except ProvisionError as error:
                raise CommandFailed(f"{body['kind']} {name}: {error.message}") from error
            if before is None or before["metadata"]["resourceVersion"] != now["metadata"]["resourceVersion"]:
                changed.append(f"{body['kind']}/{name}")
                self.report(f"{'created' if before is None else 'changed'} {body['kind']} {name}")
        return changed

    # --- until it responds

    def _await_pods(self) -> None:
        """Wait until every Pod is of the new kind and ready. Raises CommandFailed with what keeps one from it."""
        clock, shown = SteadyClock(), ""
        ends_at = clock.now() + self.options.timeout_s
        while True:
            deployment = self.api.find("deployment", manifests.DEPLOYMENT)
            if deployment is None:
                raise CommandFailed(f"the Deployment {manifests.DEPLOYMENT} was deleted meanwhile")
            if is_rolled_out(deployment):
                return
            pods = self.api.list("pod", CONTROLLERS, managed=False).items
            sentence = progress(deployment, pods)
            if sentence != shown:
                self.report(sentence)
                shown = sentence
            stuck = obstacle(deployment, pods)
            if stuck is not None or clock.now() >= ends_at:
                raise CommandFailed(self._why(stuck, sentence))
            time.sleep(POLL_S)

    def _why(self, stuck: tuple[str, str] | None, sentence: str) -> str:
        if stuck is None:
            return f"no controller is ready after {self.options.timeout_s:g} s: {sentence}"
        pod, reason = stuck
        log = ""
        if "exit" in reason:
            try:
                lines = (
                    self.api.read_log(pod, "controller", None, 64 * 1024)
                    .decode(errors="replace")
                    .splitlines()
                )
                log = f"; its log ends with: {lines[-1].partition(' ')[2]}" if lines else ""
            except ProvisionError as error:
                log = f"; its log cannot be read: {error.message}"
        return f"{pod}: {reason}{log}; correct it and run the command again"

    def _await_health(self) -> dict[str, Any]:
        clock, client = SteadyClock(), ControllerClient(self.home, self.target.remote)
        ends_at = clock.now() + self.options.timeout_s
        while True:
            try:
                health = client.health()
                if health["lease"]["leads"]:
                    return health
                reason = "it stands by"
            except (*AWAY, RefusedError) as error:
                reason = str(error)
            if clock.now() >= ends_at:
                raise CommandFailed(f"the controller in {self.target.namespace} does not lead: {reason}")
            time.sleep(POLL_S)

    def _add_context(self) -> None:
        contexts = Contexts.of(self.home)
        remotes = {**contexts.remotes, self.options.context: self.target.remote}
        contexts._replace(remotes=remotes).write(self.home)


def _notes(body: Json) -> Mapping[str, str]:
    return body["metadata"].get("annotations") or {}


def _image(deployment: Json | None) -> str:
    if deployment is None:
        return ""
    return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])


def _database(deployment: Json | None) -> str:
    """Return the name of the Secret with the database's URL; "" for SQLite."""
    if deployment is None:
        return ""
    variables = deployment["spec"]["template"]["spec"]["containers"][0].get("env") or ()
    for one in variables:
        if one["name"] == manifests.DATABASE_VARIABLE:
            return str(one["valueFrom"]["secretKeyRef"]["name"])
    return ""


_VALID = timedelta(days=3650)


def new_keys() -> dict[str, bytes]:
    """Return the keys that two controllers share."""
    from cryptography.fernet import Fernet

    return {
        "sealing.key": Fernet.generate_key(),
        "machines.key": secrets.token_bytes(MACHINE_SECRET_BYTES),
        "metrics.token": secrets.token_hex(32).encode(),
    }


def certificate(namespace: str, now: float) -> dict[str, bytes]:
    """Return a key and a certificate of the API that signs itself, for its names inside the cluster."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "skyserve-api")])
    host = f"skyserve-api.{namespace}"
    names = [f"{host}.svc", f"{host}.svc.cluster.local", host, "skyserve-api", "localhost"]
    at = datetime.fromtimestamp(now, UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(at - timedelta(hours=1))
        .not_valid_after(at + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(one) for one in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return {"tls.crt": made.public_bytes(pem), "tls.key": private}


# What a cluster would refuse of a deployment, before anything of it is changed: every object is sent as a dry run.
#
# Admission decides on it as on the real one: quotas, LimitRanges, PodSecurity, webhooks, and whether the caller may grant the rights of
# the Roles. A Deployment's Pods are admitted later and by others, so one is sent as well. In a namespace that does not exist yet nothing can be
# asked; there the rights are reviewed one by one.

_ROLES = ("Role", "ClusterRole")


def refusals(api: KubeApi, wanted: Sequence[Json], *, has_namespace: bool) -> Iterator[str]:
    """Yield a sentence for each object that the cluster would refuse."""
    for body in wanted:
        if not has_namespace and "namespace" in body["metadata"]:
            continue
        kind, name = manifests.kind_of(body), body["metadata"]["name"]
        if kind == "persistent_volume_claim" and api.find(kind, name) is not None:
            continue  # it is left as it is
        if kind == "persistent_volume_claim":
            yield from _of_storage(api, body)
        try:
            api.apply(kind, body, is_dry=True)
        except ProvisionError as error:
            # A binding may name a Role that is made in the same deployment; the dry run of that Role has decided.
            if not (kind.endswith("role_binding") and error.code == "NotFound"):
                yield f"{body['kind']} {name}: {_said(error)}"
    if has_namespace:
        yield from _of_pods(api, wanted)
    else:
        missing = [right for right in grants(wanted) if not may(api, right)]
        if missing:
            yield f"you do not hold what its Roles grant: {', '.join(map(str, missing))}"


def _of_storage(api: KubeApi, claim: Mapping[str, Any]) -> Iterator[str]:
    """A claim of a class that does not exist is accepted, and waits for ever."""
    wanted = claim["spec"].get("storageClassName")
    try:
        known = [str(one["metadata"]["name"]) for one in api.list_storage_classes().items] if wanted else []
    except ProvisionError:
        return  # who may not list them learns it from the Pod that waits
    if wanted and wanted not in known:
        listed = ", ".join(known) or "none"
        yield f"PersistentVolumeClaim {claim['metadata']['name']}: there is no storage class {wanted} (there is: {listed})"


def grants(wanted: Sequence[Json]) -> list[Right]:
    """Return the rights that the Roles among the objects grant."""
    return [
        Right(verb, group, resource, body["kind"] == "ClusterRole")
        for body in wanted
        if body["kind"] in _ROLES
        for rule in body["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]


def may(api: KubeApi, right: Right) -> bool:
    """Return whether the caller has the right."""
    resource, _, sub = right.resource.partition("/")
    attributes = {"verb": right.verb, "group": right.group, "resource": resource}
    if sub:
        attributes["subresource"] = sub
    if right.is_cluster_wide:
        attributes["namespace"] = ""
    return api.may(attributes)[0]


def _of_pods(api: KubeApi, wanted: Sequence[Json]) -> Iterator[str]:
    if not may(api, Right("create", "", "pods")):
        return  # who may not create Pods may not ask about them
    for body in wanted:
        if body["kind"] != "Deployment":
            continue
        pod = _pod_of(body)
        if api.find("service_account", pod["spec"]["serviceAccountName"]) is None:
            del pod["spec"]["serviceAccountName"]  # it is made in the same deployment
        try:
            api.create("pod", pod, is_dry=True)
        except ProvisionError as error:
            yield f"the Pods of Deployment {body['metadata']['name']}: {_said(error)}"


def _said(error: ProvisionError) -> str:
    """Return the server's sentence in one line; advice about a missing right is kept."""
    from provisioners.kubernetes.errors import said_by_server  # an extra

    message = error.message if isinstance(error, AuthError) else said_by_server(error.message)
    return " ".join(message.split())


def _pod_of(deployment: Mapping[str, Any]) -> Json:
    template = copy.deepcopy(deployment["spec"]["template"])
    meta = {**template["metadata"], "name": f"{deployment['metadata']['name']}-check"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]}
