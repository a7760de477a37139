"""The API of a cluster over HTTP on loopback: discovery, the verbs, watches, logs and access reviews, as kubectl and the
official clients use them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.clouds.kubernetes import kube_exec
from tests.clouds.kubernetes.kube_admission import check_grant
from tests.clouds.kubernetes.kube_discovery import discovery
from tests.clouds.kubernetes.kube_store import CLUSTER_WIDE, KINDS, Json, Refused, not_found, stamp
from tests.clouds.kubernetes.kube_world import NAMESPACE, KubeWorld

TOKEN = "test-token-0123456789abcdef"
_USER = "system:serviceaccount:ml:skyserve"
_BOOKMARK_S = 0.5  # real clusters send one about every minute


class KubeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, world: KubeWorld) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.world = world
        self.is_over = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away."""

    def kubeconfig(self, path: Path, name: str = "test", token: str = TOKEN) -> Path:
        text = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "clusters": [{"name": name, "cluster": {"server": self.url}}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": NAMESPACE}}],
        }
        path.write_text(yaml.safe_dump(text))
        return path


@contextmanager
def serving(world: KubeWorld) -> Iterator[KubeServer]:
    server = KubeServer(world)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.is_over = True
        with world.store.lock:
            world.store.moved.notify_all()
        server.shutdown()
        server.server_close()
        world.close()


class _Cut(Exception):
    """The connection breaks."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: KubeServer

    def log_message(self, *_: Any) -> None:
        """Silent."""

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(
            self.server.world.store.clock("api") if timestamp is None else timestamp
        )

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(60.0)

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def do_PATCH(self) -> None:
        self._answer("PATCH")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def _answer(self, method: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length) if length else b""
        try:
            self._route(method, json.loads(raw) if raw else {})
        except Refused as refusal:
            headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
            self._send(refusal.body(), refusal.code, headers)
        except (_Cut, BrokenPipeError, ConnectionResetError):
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(2)

    def _route(self, method: str, body: Json) -> None:
        world, troubles = self.server.world, self.server.world.troubles
        url = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        if troubles.is_mute:
            raise _Cut
        if troubles.token and self.headers.get("Authorization") != f"Bearer {troubles.token}":
            raise Refused(401, "Unauthorized", "Unauthorized")
        if (found := discovery(url.path, world.version)) is not None:
            return self._send(found)
        resource, namespace, name, sub = _place_of(url.path)
        verb = _verb(method, name, query)
        with world.store.lock:
            world.counts[f"{verb} {resource}"] = world.counts.get(f"{verb} {resource}", 0) + 1
        self._meet_troubles(verb, resource, sub, namespace)
        is_last = self._counts_down()
        if is_last is False:
            raise _Cut  # it crashes before the call
        response = self._do(verb, resource, namespace, name, sub, body, query)
        if is_last or (method != "GET" and self._is_cut()):
            raise _Cut
        if response is not None:
            self._send(response, 201 if verb == "create" else 200)
        return None

    def _meet_troubles(self, verb: str, resource: str, sub: str, namespace: str) -> None:
        troubles = self.server.world.troubles
        full = f"{resource}/{sub}" if sub else resource
        with self.server.world.store.lock:
            if troubles.throttled:
                troubles.throttled -= 1
                raise Refused(429, "TooManyRequests", "too many requests", 1)
            if troubles.fail:
                troubles.fail -= 1
                raise Refused(500, "InternalError", "etcdserver: request timed out")
        if resource == "selfsubjectaccessreviews":
            return
        # What roles allow in the namespace they do not allow in all of them.
        is_beyond = troubles.allowed is not None and not namespace and resource not in CLUSTER_WIDE
        if is_beyond or troubles.refuses(verb, full):
            group = KINDS[resource][0].rpartition("/")[0]
            where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
            raise Refused(
                403,
                "Forbidden",
                f'{full} is forbidden: User "{_USER}" cannot {verb} resource "{full}" in API group "{group}" {where}',
            )

    def _counts_down(self) -> bool | None:
        """Return True if the caller crashes after this call, False if before, None if it survives."""
        troubles = self.server.world.troubles
        with self.server.world.store.lock:
            if troubles.is_down:
                return False
            if troubles.crash is None:
                return None
            left, after = troubles.crash
            troubles.crash = (left - 1, after)
            if left > 0:
                return None
            troubles.crash, troubles.is_down = None, True
            return after

    def _is_cut(self) -> bool:
        troubles = self.server.world.troubles
        with self.server.world.store.lock:
            if troubles.cut:
                troubles.cut -= 1
                return True
        return False

    def _do(
        self, verb: str, resource: str, namespace: str, name: str, sub: str, body: Json, query: dict[str, str]
    ) -> Json | None:
        world, is_dry = self.server.world, query.get("dryRun") == "All"
        if resource == "selfsubjectaccessreviews":
            return _review(world, body)
        if sub == "log":
            return self._log(namespace, name, query)
        if sub == "exec":
            return self._exec(namespace, name, query)
        if sub:
            raise not_found(resource, name)
        match verb:
            case "list":
                return self._list(resource, namespace, query)
            case "watch":
                return self._watch(resource, namespace, name, query)
            case "get":
                return world.store.get(resource, namespace, name)
            case "create":
                self._check_grant(resource, body)
                return world.create(resource, namespace, body, is_dry=is_dry)
            case "update":
                return world.store.put(resource, namespace, name, body)
            case "patch" if "apply-patch" in self.headers.get("Content-Type", ""):
                self._check_grant(resource, body)
                return world.apply(resource, namespace, body, query["fieldManager"], is_dry=is_dry)
            case "patch":
                return world.store.patch(resource, namespace, name, body)
            case "deletecollection":
                for one in [
                    each for each in world.store.list(resource, namespace) if _is_selected(each, query)
                ]:
                    world.delete(resource, namespace, one["metadata"]["name"], body)
                return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
            case "delete":
                options = dict(body)
                if "gracePeriodSeconds" in query:
                    options["gracePeriodSeconds"] = int(query["gracePeriodSeconds"])
                return world.delete(resource, namespace, name, options)
        raise Refused(
            405, "MethodNotAllowed", "the server does not allow this method on the requested resource"
        )

    def _check_grant(self, resource: str, body: Json) -> None:
        troubles = self.server.world.troubles
        check_grant(resource, body, lambda verb, name: not troubles.refuses(verb, name), _USER)

    def _list(self, resource: str, namespace: str, query: dict[str, str]) -> Json:
        store = self.server.world.store
        version, kind = KINDS[resource]
        with store.lock:
            items = [one for one in store.list(resource, namespace or None) if _is_selected(one, query)]
            start = 0
            if query.get("continue"):
                at, _, rest = query["continue"].partition(":")
                if int(at) < store.oldest:
                    raise Refused(410, "Expired", "The provided continue parameter is too old")
                start = int(rest)
            limit = int(query.get("limit") or 0)
            page = items[start : start + limit] if limit else items
            meta: Json = {"resourceVersion": str(store.version)}
            if limit and start + limit < len(items):
                meta |= {
                    "continue": f"{store.version}:{start + limit}",
                    "remainingItemCount": len(items) - start - limit,
                }
            # Made into text here, because the objects are the store's own.
            text = json.dumps({"kind": f"{kind}List", "apiVersion": version, "metadata": meta, "items": page})
        self._send_text(text.encode())
        return None  # type: ignore[return-value]

    def _watch(self, resource: str, namespace: str, name: str, query: dict[str, str]) -> None:
        store, world = self.server.world.store, self.server.world
        if name:
            query = {**query, "fieldSelector": f"metadata.name={name}"}
        version = int(query.get("resourceVersion") or 0) or store.version
        until = monotonic() + float(query.get("timeoutSeconds") or 3600)
        with store.lock:
            store.since(version, resource)  # 410, if it is too old
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        marks = query.get("allowWatchBookmarks") == "true"
        seen: set[str] = set()
        while monotonic() < until and not self.server.is_over:
            if world.troubles.is_mute or world.troubles.is_down:
                raise _Cut
            try:
                with store.lock:
                    changes = store.since(version, resource)
                    if not changes:
                        store.moved.wait(_BOOKMARK_S)
                        changes = store.since(version, resource)
                    newest = store.version if not changes else changes[-1].version
            except Refused as refusal:
                self._chunk({"type": "ERROR", "object": refusal.body()})
                break
            if world.troubles.is_mute or world.troubles.is_down:
                raise _Cut
            lines = []
            for change in changes:
                if namespace and change.item["metadata"].get("namespace") != namespace:
                    continue
                uid = change.item["metadata"]["uid"]
                if _is_selected(change.item, query):
                    lines.append({"type": change.kind, "object": change.item})
                    seen.add(uid)
                elif uid in seen:  # it has left the selection
                    lines.append({"type": "DELETED", "object": change.item})
                    seen.discard(uid)
            if not lines and marks:
                api, kind = KINDS[resource]
                mark = {"kind": kind, "apiVersion": api, "metadata": {"resourceVersion": str(newest)}}
                lines.append({"type": "BOOKMARK", "object": mark})
            if lines:
                self._chunk(*lines)
            version = newest
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, *lines: Json) -> None:
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _log(self, namespace: str, name: str, query: dict[str, str]) -> None:
        world = self.server.world
        with world.store.lock:
            pod = world.store.get("pods", namespace, name)
            container = query.get("container") or pod["spec"]["containers"][0]["name"]
            if world.kubelet is None:
                lines = []
            else:
                key = (pod["metadata"]["uid"], container)
                if key not in world.kubelet.running:
                    raise Refused(
                        400, "BadRequest", f'container "{container}" in pod "{name}" is waiting to start'
                    )
                lines = world.kubelet.log_of(pod, container)
        since = stamp(world.now - int(query["sinceSeconds"])) if "sinceSeconds" in query else ""
        stamped = query.get("timestamps") == "true"
        text = b"".join(
            (at.encode() + b" " if stamped else b"") + line
            for at, line in lines
            if not since or at[:19] >= since[:19]
        )
        if "limitBytes" in query:
            text = text[: int(query["limitBytes"])]
        self._send_text(text, "text/plain")

    def _exec(self, namespace: str, name: str, query: dict[str, str]) -> None:
        kubelet, pod = self.server.world.kubelet, self.server.world.store.get("pods", namespace, name)
        words = parse_qs(urlsplit(self.path).query)["command"]
        found = None if kubelet is None else kubelet.place_of(pod, query["container"])
        if found is None:
            raise Refused(400, "BadRequest", f"container {query['container']} is not running")
        self.send_response(101)
        for key, value in kube_exec.accepted(self.headers["Sec-WebSocket-Key"]).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.flush()
        self.connection.settimeout(None)
        self.close_connection = True
        kube_exec.carry(self.rfile, self.wfile, found[0], words, found[1])

    def _send(self, body: Json, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send_text(json.dumps(body).encode(), "application/json", status, headers)

    def _send_text(
        self,
        data: bytes,
        kind: str = "application/json",
        status: int = 200,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)


def _verb(method: str, name: str, query: dict[str, str]) -> str:
    if method == "GET":
        if query.get("watch") in ("true", "1"):
            return "watch"
        return "get" if name else "list"
    if method == "DELETE" and not name:
        return "deletecollection"
    return {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[method]


def _place_of(path: str) -> tuple[str, str, str, str]:
    """Return the resource, namespace, name and subresource of a path."""
    parts = path.strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    resource, name, sub = [*rest, "", "", ""][:3]
    if resource not in KINDS and resource != "selfsubjectaccessreviews":
        raise Refused(404, "NotFound", "the server could not find the requested resource")
    return resource, namespace, name, sub


def _is_selected(item: Json, query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels") or {}
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, _, value = term.replace("==", "=").partition("=")
        if labels.get(key) != value:
            return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        negated = "!=" in term
        key, _, value = term.replace("!=", "=").partition("=")
        found: Any = item
        for part in key.split("."):
            found = (found or {}).get(part)
        if (found == value) == negated:
            return False
    return True


def _review(world: KubeWorld, body: Json) -> Json:
    asked = body["spec"]["resourceAttributes"]
    full = asked["resource"] + (f"/{asked['subresource']}" if asked.get("subresource") else "")
    denied = world.troubles.refuses(asked["verb"], full)
    status = {"allowed": not denied, **({"reason": "no RBAC policy matched"} if denied else {})}
    return {**body, "metadata": {}, "status": status}
