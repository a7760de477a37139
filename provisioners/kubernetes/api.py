"""The Kubernetes API by the official client: JSON in, JSON out, every call bounded in time and tried once, its errors ours.

The client makes the requests and has the credentials (kubeconfig with its exec plug-ins, or the service account of the Pod that
this runs in). Its models are left out on the way back: a watch of thousands of Pods would spend its time on them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, cast

from kubernetes import client as kube_client
from kubernetes import config as kube_config
from kubernetes.client import rest

from policies.model import Zone
from provisioners.clock import steady_now
from provisioners.kubernetes.errors import CLOUD, error_of, unreachable
from provisioners.kubernetes.translate import MANAGED, MANAGER
from provisioners.port.errors import AuthError, ProvisionError
from provisioners.rate_limit import Rate, RateLimiter

Json = dict[str, Any]

CALL_TIMEOUT_S = (5.0, 30.0)  # to connect, to read
_LOG_TIMEOUT_S = (5.0, 10.0)  # of what someone waits for at a terminal
WATCH_S = 290  # after which the server closes a watch; a load balancer in between may at 300
QUIET_S = 90.0  # a watch that has been silent for longer is cut off: bookmarks come about every minute
_PAGE = 500
_RATE = Rate(burst=100, per_s=50)  # as client-go's controllers; the server has limits of its own

_GROUPS = {
    "pod": "CoreV1Api",
    "event": "CoreV1Api",
    "secret": "CoreV1Api",
    "service": "CoreV1Api",
    "resource_quota": "CoreV1Api",
    "lease": "CoordinationV1Api",
    "cron_job": "BatchV1Api",
    "deployment": "AppsV1Api",
    "pod_disruption_budget": "PolicyV1Api",
    "config_map": "CoreV1Api",
    "persistent_volume_claim": "CoreV1Api",
    "service_account": "CoreV1Api",
    "namespace": "CoreV1Api",
    "network_policy": "NetworkingV1Api",
    "role": "RbacAuthorizationV1Api",
    "role_binding": "RbacAuthorizationV1Api",
    "cluster_role": "RbacAuthorizationV1Api",
    "cluster_role_binding": "RbacAuthorizationV1Api",
    "review": "AuthorizationV1Api",
    "storage_class": "StorageV1Api",
    "version": "VersionApi",
    "groups": "ApisApi",
}
_CLUSTER_WIDE = ("namespace", "cluster_role", "cluster_role_binding", "storage_class")


@dataclass(frozen=True, slots=True)
class Listed:
    """The items of a list, and the version from which a watch goes on."""

    items: list[Json]
    version: str


class ExpiredError(Exception):
    """The version that a watch should begin at is too old (410): list again."""


class ConflictError(Exception):
    """An object of that name exists."""


class KubeApi:
    """One namespace of one cluster. Thread-safe; credentials are looked for at the first call.

    `client` gives an `ApiClient` of the official client instead, and the namespace of its context.
    """

    def __init__(
        self,
        region: str,
        namespace: str | None,
        client: Callable[[], tuple[Any, str]],
        *,
        steady: Callable[[], float] = steady_now,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.region = region
        self._namespace = namespace
        self._make = client
        self._client: Any = None
        self._apis: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._pacer = RateLimiter(steady, sleep)
        self._steady = steady
        self._dated: tuple[float, float] | None = None  # the date of the last response, and when it came

    @property
    def namespace(self) -> str:
        """Raise AuthError if there are no credentials."""
        self._connected()
        return cast(str, self._namespace)

    def server_s(self) -> float | None:
        """Return the UNIX seconds of the API server's clock, to about a second; None if no response had a date."""
        dated = self._dated
        return None if dated is None else dated[0] + self._steady() - dated[1]

    def create(self, kind: str, body: Json, zone: Zone | None = None, *, is_dry: bool = False) -> Json:
        """Raise ConflictError if there is one of that name. With `is_dry` admission decides, and nothing is created."""
        how = {"dry_run": "All", "field_validation": "Strict"} if is_dry else {}
        try:
            return self._call(kind, *self._place("create", kind), body, zone=zone, **how)
        except ProvisionError as error:
            if error.code == "AlreadyExists":
                raise ConflictError(error.message) from error
            raise

    def find(self, kind: str, name: str, zone: Zone | None = None) -> Json | None:
        """Return the object; None if there is none."""
        try:
            return self._call(kind, *self._place("read", kind, name), zone=zone)
        except ProvisionError as error:
            if error.code == "NotFound":
                return None
            raise

    def apply(self, kind: str, body: Json, *, is_dry: bool = False) -> Json:
        """Create the object, or give it the fields of `body` (server-side apply); return it as it is now.

        With `is_dry` admission decides, and nothing is changed.
        """
        place = self._place("patch", kind, body["metadata"]["name"])
        how: dict[str, Any] = {
            "field_manager": MANAGER,
            "force": True,
            "_content_type": "application/apply-patch+yaml",
            **({"dry_run": "All"} if is_dry else {}),
        }
        return self._call(kind, *place, body, **how)

    def patch(self, kind: str, name: str, body: Json) -> Json | None:
        """Return the object as it is now; None if there is none, or one of another uid than `body` has."""
        try:
            return self._call(kind, f"patch_namespaced_{kind}", name, self.namespace, body)
        except ProvisionError as error:
            if _is_gone(error):
                return None
            raise

    def replace(self, kind: str, name: str, body: Json) -> Json | None:
        """Return the object as it is now; None if there is none. Raises ConflictError if it has changed since it was read."""
        try:
            return self._call(kind, f"replace_namespaced_{kind}", name, self.namespace, body)
        except ProvisionError as error:
            if error.code == "NotFound":
                return None
            if error.code == "Conflict":
                raise ConflictError(error.message) from error
            raise

    def delete(
        self, kind: str, name: str, uid: str = "", *, after_parts: bool = False, at_once: bool = False
    ) -> Json | None:
        """Return the object as it is now, or what the server says; None if there is none, or one of another uid.

        With `after_parts` a Deployment exists until its Pods are gone; what else it owns goes before. With `at_once` a Pod is
        gone before its kubelet has ended it.
        """
        policy = "Foreground" if after_parts else "Background"
        options: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": policy}
        if at_once:
            options["gracePeriodSeconds"] = 0
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            return self._call(kind, *self._place("delete", kind, name), body=options)
        except ProvisionError as error:
            if _is_gone(error):
                return None
            raise

    def list(self, kind: str, labels: Mapping[str, str] | None = None, *, managed: bool = True) -> Listed:
        """Return what is in the namespace: only ours, unless `managed` is false."""
        return self._pages(
            kind, f"list_namespaced_{kind}", self.namespace, label_selector=_selector(labels, managed)
        )

    def list_events(self, uid: str) -> Listed:
        """Return the events about an object."""
        fields = f"involvedObject.uid={uid}"
        return self._pages("event", "list_namespaced_event", self.namespace, field_selector=fields)

    def list_nodes(self) -> Listed:
        return self._pages("pod", "list_node")

    def list_storage_classes(self) -> Listed:
        return self._pages("storage_class", "list_storage_class")

    def list_all_pods(self) -> Listed:
        """Return the Pods of all namespaces that take room on nodes."""
        fields = "status.phase!=Succeeded,status.phase!=Failed"
        return self._pages("pod", "list_pod_for_all_namespaces", field_selector=fields)

    def watch_pods(self, version: str) -> Iterator[Json]:
        """Yield the events of our Pods after that version until the server ends the watch. Raises ExpiredError."""
        return self._watch(
            "list_namespaced_pod", version, self.namespace, label_selector=_selector(None, True)
        )

    def watch_deployments(self, version: str) -> Iterator[Json]:
        return self._watch(
            "list_namespaced_deployment",
            version,
            self.namespace,
            kind="deployment",
            label_selector=_selector(None, True),
        )

    def watch_nodes(self, version: str) -> Iterator[Json]:
        return self._watch("list_node", version)

    def read_log(self, name: str, container: str, seconds: int | None, most: int) -> bytes:
        """Return the lines of the last seconds of a container's log, each with its time before it. Raises ProvisionError."""
        more: dict[str, Any] = {"since_seconds": seconds} if seconds is not None else {}
        return self._raw(
            "pod",
            "read_namespaced_pod_log",
            name,
            self.namespace,
            within=_LOG_TIMEOUT_S,
            container=container,
            timestamps=True,
            limit_bytes=most,
            **more,
        )

    def may(self, attributes: Mapping[str, str]) -> tuple[bool, str]:
        """Return whether we may do that (verb, group, resource), and the server's reason if not."""
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {"namespace": self.namespace, **attributes}},
        }
        found = self._call("review", "create_self_subject_access_review", body)
        status = found.get("status") or {}
        return bool(status.get("allowed")), str(status.get("reason") or "")

    def version(self) -> tuple[int, int, str]:
        """Return the major and minor version of the server, and its whole name."""
        found = self._call("version", "get_code")
        numbers = [int("".join(filter(str.isdigit, str(found.get(key)))) or 0) for key in ("major", "minor")]
        return numbers[0], numbers[1], str(found.get("gitVersion") or "")

    def groups(self) -> frozenset[str]:
        """Return the groups and versions of the API beside the core: ``apps/v1``."""
        found = self._call("groups", "get_api_versions").get("groups") or ()
        return frozenset(str(each["groupVersion"]) for one in found for each in one.get("versions") or ())

    # --- inside

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client, default = self._make()
                self._namespace = self._namespace or default
            return self._client

    def _place(self, verb: str, kind: str, *names: str) -> tuple[str, ...]:
        """Return the client's method for a verb and a kind, and what names the object in its call."""
        if kind in _CLUSTER_WIDE:
            return f"{verb}_{kind}", *names
        return f"{verb}_namespaced_{kind}", *names, self.namespace

    def _method(self, kind: str, name: str) -> Callable[..., Any]:
        client, group = self._connected(), _GROUPS[kind]
        with self._lock:
            if group not in self._apis:
                self._apis[group] = getattr(kube_client, group)(client)
            return cast(Callable[..., Any], getattr(self._apis[group], name))

    def _call(self, kind: str, name: str, *given: Any, zone: Zone | None = None, **more: Any) -> Json:
        found = json.loads(self._raw(kind, name, *given, zone=zone, **more))
        return cast(Json, found)

    def _raw(
        self,
        kind: str,
        name: str,
        *given: Any,
        zone: Zone | None = None,
        within: tuple[float, float] = CALL_TIMEOUT_S,
        **more: Any,
    ) -> bytes:
        response = self._open(kind, name, *given, zone=zone, _request_timeout=within, **more)
        try:
            return cast(bytes, response.read(cache_content=True) or response.data or b"")
        except Exception as error:
            raise self._failed(error, zone) from error
        finally:
            response.release_conn()

    def _open(self, kind: str, name: str, *given: Any, zone: Zone | None = None, **more: Any) -> Any:
        """Return the response, whose body is not read yet."""
        method = self._method(kind, name)
        self._pacer.take_turn("calls", _RATE)
        try:
            response = method(*given, _preload_content=False, **more)
        except Exception as error:
            raise self._failed(error, zone) from error
        with suppress(TypeError, ValueError):
            self._dated = (parsedate_to_datetime(response.headers["Date"]).timestamp(), self._steady())
        if response.status >= 400:
            body, header = response.data, response.headers.get("Retry-After")
            response.release_conn()
            raise error_of(response.status, body, zone, header)
        return response

    def _failed(self, error: Exception, zone: Zone | None) -> ProvisionError:
        """Anything that the client raises: a refusal that it has read, or no response."""
        status = getattr(error, "status", None)
        if isinstance(status, int) and status >= 400:
            headers = getattr(error, "headers", None) or {}
            return error_of(status, getattr(error, "body", None), zone, headers.get("Retry-After"))
        # The client makes 0 of what goes wrong with TLS, as when a server stops while a connection is made.
        is_lost = type(error).__module__.startswith(("urllib3", "http.client", "socket", "ssl"))
        if status == 0 or is_lost or isinstance(error, OSError):
            return unreachable(self.region, error, zone)
        raise error  # a defect

    def _pages(self, kind: str, name: str, *given: Any, **more: Any) -> Listed:
        items: list[Json] = []
        following: dict[str, Any] = {}
        while True:
            page = self._call(kind, name, *given, limit=_PAGE, **following, **more)
            items += page.get("items") or []
            meta = page.get("metadata") or {}
            if not meta.get("continue"):
                return Listed(items, str(meta.get("resourceVersion") or ""))
            following = {"_continue": meta["continue"]}

    def _watch(self, name: str, version: str, *given: Any, kind: str = "pod", **more: Any) -> Iterator[Json]:
        try:
            response = self._open(
                kind,
                name,
                *given,
                watch=True,
                resource_version=version,
                allow_watch_bookmarks=True,
                timeout_seconds=WATCH_S,
                _request_timeout=(CALL_TIMEOUT_S[0], QUIET_S),
                **more,
            )
        except ProvisionError as error:
            if error.code in ("Expired", "Gone"):
                raise ExpiredError from error
            raise
        try:
            yield {"type": "BOOKMARK", "object": {}}  # the server has accepted the version
            for event in _events(response):
                if event.get("type") == "ERROR":
                    status = event.get("object") or {}
                    if status.get("code") == 410:
                        raise ExpiredError
                    raise error_of(int(status.get("code") or 500), json.dumps(status))
                yield event
        except (ExpiredError, ProvisionError, GeneratorExit):
            raise
        except Exception as error:
            raise self._failed(error, None) from error
        finally:
            response.close()


def _is_gone(error: ProvisionError) -> bool:
    """Return whether there is no such object, or one of another uid.

    To a deletion with another uid the API responds 409 Conflict, to a change 422 Invalid.
    """
    if error.code == "Invalid":
        return "metadata.uid" in error.message
    return error.code == "NotFound" or (error.code == "Conflict" and "uid" in error.message.lower())


def _events(response: Any) -> Iterator[Json]:
    """Yield the lines of a response as they come."""
    rest = b""
    for chunk in response.stream(amt=None, decode_content=True):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (json.loads(line) for line in lines if line.strip())


def _selector(labels: Mapping[str, str] | None, managed: bool) -> str | None:
    wanted = {MANAGED: MANAGER} if managed else {}
    return ",".join(f"{key}={value}" for key, value in {**wanted, **(labels or {})}.items()) or None


def client_of(context: str | None, kubeconfig: str | None) -> tuple[Any, str]:
    """Return the official client for a context, and its namespace. Raises AuthError.

    Without a kubeconfig, inside a Pod, it is the Pod's own service account.
    """
    try:
        found, active = kube_config.list_kube_config_contexts(config_file=kubeconfig)
    except kube_config.ConfigException as error:
        if context is None and kubeconfig is None:
            return _in_cluster(error)
        raise AuthError(f"the kubeconfig cannot be used: {error}", cloud=CLOUD) from error
    chosen = active if context is None else next((one for one in found if one["name"] == context), None)
    if chosen is None:
        names = ", ".join(one["name"] for one in found) or "none"
        raise AuthError(f"the kubeconfig has no context {context!r} (it has: {names})", cloud=CLOUD)
    try:
        made = kube_config.new_client_from_config(
            config_file=kubeconfig, context=chosen["name"], persist_config=False
        )
    except Exception as error:  # of a login program, too
        raise AuthError(f"context {chosen['name']}: {error}", cloud=CLOUD) from error
    return tuned(made), str(chosen["context"].get("namespace") or "default")


def tuned(client: Any) -> Any:
    """Return the client without retries of its own, with a connection for each thread."""
    configuration = client.configuration
    configuration.retries = False
    configuration.connection_pool_maxsize = 32
    client.rest_client = rest.RESTClientObject(configuration)
    return client


def _in_cluster(cause: Exception) -> tuple[Any, str]:
    configuration = kube_client.Configuration()
    try:
        kube_config.load_incluster_config(client_configuration=configuration)
        namespace = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text().strip()
    except (kube_config.ConfigException, OSError) as error:
        raise AuthError(f"there is no kubeconfig, and this is no Pod: {cause}", cloud=CLOUD) from error
    return tuned(kube_client.ApiClient(configuration)), namespace
