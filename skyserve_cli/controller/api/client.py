"""The CLI's side of the controller's API, and how a controller is started."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from skyserve_cli.controller.api import unix_socket
from skyserve_cli.controller.api.reasons import CHECK_NETWORK, LOG_HINT, Reason, of_activity, of_home
from skyserve_cli.controller.api.remote import Remote
from skyserve_cli.controller.api.waiting import ASK_TIMEOUT_S, Waiting
from skyserve_cli.controller.persistence.moved import why_not_to_start
from skyserve_cli.controller.phase import read_phase
from skyserve_cli.controller.reconcile.clock import SystemClock
from skyserve_cli.home import Home, is_held

if TYPE_CHECKING:
    from skyserve_cli.controller.api.web_socket import WebSocket
    from skyserve_cli.controller.uploads.folder import Known
    from skyserve_cli.controller.uploads.sending import Local

START_TIMEOUT_S = 30.0
COMEBACK_TIMEOUT_S = 15.0  # the supervisor's longest pause, and the start
POLL_S = 0.05
CALL_TIMEOUT_S = 30.0
GATEWAY_TIMEOUT = 504
UPLOAD_TIMEOUT_S = 300.0  # of one request, which has some megabytes
TIDY_TIMEOUT_S = 900.0  # a cloud may take its time to give networks up


_ADDED_TO_ERRORS = ("(Background on this error at", "[SQL:", "[parameters:")


class ControllerDownError(Exception):
    """The controller is not running, so the state of services is not known (they go on serving without it); `serve controller start` starts it."""


class UnreachableError(Exception):
    """The controller on another host does not respond; the text gives the reason."""


#: For loops that wait for what a controller does: it may be away for some seconds.
AWAY = (ControllerDownError, UnreachableError)


class MisconfiguredError(ControllerDownError):
    """The controller does not start with this configuration."""


class UnusableDatabaseError(ControllerDownError):
    """The controller does not start on this database."""


#: By the exit code of a controller that a restart would not help.
_DOES_NOT_START = {2: MisconfiguredError, 4: UnusableDatabaseError}


class _NotReachedError(ControllerDownError):
    """The call has not arrived, or it only reads: it may be made again."""


class RefusedError(Exception):
    """The controller refused; the text gives the reason. `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Services(NamedTuple):
    """A response, its ETag, and how old it is."""

    views: list[dict[str, Any]] | None
    etag: str
    age_s: float


class ControllerClient:
    """Calls of one home's controller, or of a `remote` one. Plain http.client: a command that makes one call need not load a framework."""

    def __init__(self, home: Home, remote: Remote | None = None) -> None:
        self._home = home
        self._remote = remote
        self._digests: Known = {}
        self.waiting = Waiting()
        #: Called with the path, the bytes that were sent and those in all, while local files are sent to another host.
        self.on_upload: Callable[[str, int, int], object] = lambda path, sent, total: None

    @property
    def where(self) -> str:
        """Return the URL of the remote controller, or the folder of the home."""
        return self._remote.url if self._remote else str(self._home.root)

    # --- verbs --------------------------------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        return self._json("GET", "/v1/health")

    def services(self, name: str = "", *, down: bool = False, ended: bool = False) -> list[dict[str, Any]]:
        """Return all services; only the one of that name, if one of that name is up."""
        found = self._json("GET", "/v1/services", query=_flags(down, ended, name))
        services: list[dict[str, Any]] = found["services"]
        return services

    def activity(self) -> dict[str, Any]:
        """Return what the controller is doing; see `controller.api.activity`."""
        return self._json("GET", "/v1/activity")

    def services_since(
        self, etag: str, name: str = "", *, down: bool = False, ended: bool = False, may_be_old: bool = False
    ) -> Services:
        """Return what `services` does; None in place of them if nothing changed since that ETag.

        `may_be_old`: the last ones that the controller has in memory, if its database responds slowly.
        """
        headers = {"If-None-Match": etag} if etag else {}
        if may_be_old:
            headers["Cache-Control"] = "max-stale"
        content, got = self._call("GET", "/v1/services", query=_flags(down, ended, name), headers=headers)
        age_s = float(got.get("Age", 0))
        if not content:  # 304
            return Services(None, etag, age_s)
        return Services(json.loads(content)["services"], got.get("ETag", ""), age_s)

    def put(self, name: str, spec: Mapping[str, Any], secrets: Mapping[str, str], mode: str | None) -> int:
        body = {"spec": self.send_files(spec), "secrets": dict(secrets), "mode": mode}
        return int(self._json("PUT", f"/v1/services/{name}", body)["version"])

    def down(self, name: str, *, purge: bool) -> None:
        self._json("POST", f"/v1/services/{name}/down", {"purge": purge})

    def kill(self, name: str, replica_id: int) -> None:
        self._json("POST", f"/v1/services/{name}/replicas/{replica_id}/down", {})

    def plan(
        self, spec: Mapping[str, Any], secrets: Mapping[str, str], mode: str | None = None
    ) -> dict[str, Any]:
        """Return what an `up` would do, or an update in this `mode` (None: that of the spec); see `ControllerService.plan`."""
        changed, _ = self._with_references(spec)
        return self._json("POST", "/v1/plan", {"spec": changed, "secrets": dict(secrets), "mode": mode})

    def events(
        self, service: str | None, *, after: int = 0, limit: int = 1000, newest: bool = False
    ) -> list[dict[str, Any]]:
        query = {"after": str(after), "limit": str(limit)}
        if service is not None:
            query["service"] = service
        if newest:
            query["newest"] = "1"
        events: list[dict[str, Any]] = self._json("GET", "/v1/events", query=query)["events"]
        return events

    def history(self, name: str, *, since: float = 0.0) -> dict[str, Any]:
        """Return what became of a service since then (UNIX seconds), at most since it was brought up."""
        return self._json("GET", f"/v1/services/{name}/history", query={"since": repr(since)})

    def series(self, name: str, *, since: float | None = None, replica_id: int = 0) -> dict[str, Any]:
        """Return what load balancers counted since then, of the service (0) or of one replica; see `controller.api.series_view`.

        `since` None: for the last two hours.
        """
        query = {"replica": str(replica_id), **({} if since is None else {"since": repr(since)})}
        return self._json("GET", f"/v1/services/{name}/series", query=query)

    def usage(
        self, name: str, *, since: str | None, until: str | None, by: Sequence[str], top: int | None = None
    ) -> dict[str, Any]:
        """Return what the requests of each API key and model have used on these days (2026-11-27); see `controller.api.usage_view`."""
        given = {"since": since, "until": until, "by": ",".join(by), "top": None if top is None else str(top)}
        query = {key: value for key, value in given.items() if value is not None}
        return self._json("GET", f"/v1/services/{name}/usage", query=query)

    def log(self, what: str, *, offset: int = 0, since: float | None = None) -> tuple[bytes, int]:
        """Return bytes of a log and the next offset.

        `what` is "controller", "load_balancer/NAME" or "replica/NAME/ID[/NODE]". `since` (UNIX seconds) is where to begin
        in the log of a replica, in place of the offset 0.
        """
        query = {"offset": str(offset)}
        if since is not None and offset == 0:
            query["since"] = repr(since)
        content, headers = self._call("GET", f"/v1/logs/{what}", query=query)
        return content, int(headers.get("X-Next-Offset", offset))

    def access(self, name: str, replica_id: int, *, node: int = 0) -> dict[str, Any]:
        """Return how commands run where a replica runs; see `sessions.place`."""
        path = f"/v1/services/{name}/replicas/{replica_id}/access"
        return self._json("GET", path, query={"node": str(node)})

    def session(self, name: str, replica_id: int, *, node: int = 0) -> WebSocket:
        """Open a session where a replica runs; `sessions.relay` has the messages."""
        from skyserve_cli.controller.api.web_socket import WebSocket, upgrade_headers  # loads a library

        path = f"/v1/services/{name}/replicas/{replica_id}/session"
        connection = self._connection(CALL_TIMEOUT_S)
        response, _ = self._exchange(
            connection, "GET", f"{urllib.parse.quote(path)}?node={node}", None, upgrade_headers()
        )
        if response.status != http.client.SWITCHING_PROTOCOLS:
            connection.close()
            raise RefusedError(
                response.status, f"the controller returned {response.status} in place of a session"
            )
        response.will_close = True  # a way that is used again for other calls would be given back
        return WebSocket(connection, connection.sock)

    def tidy(self, services: Sequence[str]) -> dict[str, Any]:
        """One step towards nothing being left of services that are down; see the API."""
        return self._json("POST", "/v1/tidy", {"services": list(services)}, timeout_s=TIDY_TIMEOUT_S)

    def leaks(self, cloud: str) -> dict[str, Any]:
        return self._json("GET", f"/v1/leaks/{cloud}", timeout_s=TIDY_TIMEOUT_S)

    def remove_leak(self, cloud: str, kind: str, id: str, region: str) -> dict[str, Any]:
        body = {"kind": kind, "id": id, "region": region}
        return self._json("POST", f"/v1/leaks/{cloud}/remove", body, timeout_s=TIDY_TIMEOUT_S)

    def forget_cloud(self, cloud: str) -> list[str]:
        response = self._json("POST", f"/v1/leaks/{cloud}/forget", {}, timeout_s=TIDY_TIMEOUT_S)
        return [str(problem) for problem in response["problems"]]

    def dashboard(self, port: int | None) -> dict[str, Any]:
        """Return the address of the page, with a code that works once; `port` None: the configured or the last one."""
        return self._json("POST", "/v1/dashboard", {"port": port})

    def stop(self) -> int:
        """Request the controller to stop; returns its pid."""
        return int(self._json("POST", "/v1/stop", {})["pid"])

    def tokens(self) -> list[dict[str, Any]]:
        tokens: list[dict[str, Any]] = self._json("GET", "/v1/tokens")["tokens"]
        return tokens

    def teams(self) -> list[dict[str, Any]]:
        """Return the limits of each team that the caller may see, and what it uses."""
        teams: list[dict[str, Any]] = self._json("GET", "/v1/teams")["teams"]
        return teams

    def create_token(self, name: str, role: str, services: Sequence[str] | None, team: str = "") -> str:
        listed = None if services is None else list(services)
        body = {"name": name, "role": role, "services": listed, "team": team}
        return str(self._json("POST", "/v1/tokens", body)["token"])

    def revoke_token(self, name: str) -> None:
        self._json("POST", f"/v1/tokens/{name}/revoke", {})

    # --- the process --------------------------------------------------------------------------------------

    def ensure_running(self) -> bool:
        """Start a controller if none responds; returns True if one was started. One on another host must run.

        Raises ControllerDownError with the reason if it does not come up, DeadlineError if that takes too long.
        """
        try:
            self.activity()
            return False
        except RefusedError:  # of an earlier release; or the token is refused, as the next call will be
            return False
        except ControllerDownError:
            pass
        moved = why_not_to_start(self._home)
        if moved is not None:
            raise MisconfiguredError(moved)
        self._home.create()
        descriptor = os.open(self._home.controller_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "skyserve_cli.controller.supervisor"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd="/",
                env=self._environment(),
            )
        allowed_s = self.waiting.allowance(START_TIMEOUT_S)
        until = self.waiting.now() + allowed_s
        with self.waiting.noticed(self._why):
            while self.waiting.now() < until:
                try:
                    self._call_once("GET", "/v1/activity", None, None, START_TIMEOUT_S, {})
                    return True
                except ControllerDownError:
                    code = process.poll()
                    if code in _DOES_NOT_START:
                        raise _DOES_NOT_START[code](self._log_tail()) from None
                    if code not in (None, 3):  # 3: another one is starting
                        raise ControllerDownError(
                            f"the controller did not start: {self._log_tail()} (see {self._home.controller_log})"
                        ) from None
                time.sleep(POLL_S)
        raise self.waiting.overdue(allowed_s, "it goes on without this command", self._why())

    def _environment(self) -> dict[str, str]:
        """The daemon runs in `/`, and must find the same home and the same code."""
        environment = dict(os.environ)
        environment["SKYSERVE_HOME"] = str(self._home.root)
        if "PYTHONPATH" in environment:
            paths = environment["PYTHONPATH"].split(os.pathsep)
            environment["PYTHONPATH"] = os.pathsep.join(str(Path(path).absolute()) for path in paths)
        return environment

    def _log_tail(self) -> str:
        """Return what the controller printed last, without what SQLAlchemy adds to an error: a URL, the statement, its values."""
        text = self._home.controller_log.read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith(_ADDED_TO_ERRORS)]
        return lines[-1] if lines else "it printed nothing"

    # --- local files --------------------------------------------------------------------------------------

    def send_files(self, spec: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send the local files of a spec that a controller on another host lacks; returns the spec as that host can use it.

        Raises RefusedError, also where a file cannot be sent.
        """
        if self._remote is None:
            return spec
        from skyserve_cli.controller.references import ManifestError
        from skyserve_cli.controller.uploads.sending import send

        query = {"service": str(spec["name"])}

        def announce(manifest: list[dict[str, Any]]) -> list[str]:
            response = self._json("POST", "/v1/uploads", {"manifest": manifest}, query, UPLOAD_TIMEOUT_S)
            return [str(part) for part in response["missing"]]

        def store(parts: bytes) -> None:
            self._json("POST", "/v1/uploads/parts", parts, query, UPLOAD_TIMEOUT_S)

        changed, files = self._with_references(spec)
        try:
            for each in files:
                send(each, announce, store, partial(self.on_upload, str(each.source)))
        except ManifestError as error:
            raise RefusedError(422, str(error)) from None
        return changed

    def _with_references(self, spec: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Local]]:
        """Return the spec with references to local files, which are read and not sent, and these files. Raises RefusedError."""
        if self._remote is None:
            return spec, []
        from skyserve_cli.controller.references import ManifestError
        from skyserve_cli.controller.uploads.sending import with_references

        try:
            return with_references(spec, self._digests)
        except ManifestError as error:
            raise RefusedError(422, str(error)) from None

    # --- HTTP ---------------------------------------------------------------------------------------------

    def _json(
        self,
        method: str,
        path: str,
        body: object = None,
        query: Mapping[str, str] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> dict[str, Any]:
        content, _ = self._call(method, path, body, query, timeout_s)
        response: dict[str, Any] = json.loads(content)
        return response

    def _call(
        self,
        method: str,
        path: str,
        body: object = None,
        query: Mapping[str, str] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[bytes, http.client.HTTPMessage]:
        allowed_s = self.waiting.allowance(timeout_s)
        began = self.waiting.now()
        more = dict(headers or {})
        with self.waiting.noticed(partial(self._why, path)):
            while (left_s := began + allowed_s - self.waiting.now()) > 0:
                if timeout_s <= CALL_TIMEOUT_S:
                    more["X-Deadline-S"] = f"{left_s - min(1.0, left_s / 5):.3f}"  # its refusal has to arrive
                try:
                    return self._call_once(method, path, body, query, left_s, more)
                except _NotReachedError:
                    is_back_soon = is_held(self._home.supervisor_lock) or is_held(self._home.lock)
                    if not is_back_soon or self.waiting.now() - began > COMEBACK_TIMEOUT_S:
                        raise ControllerDownError(self._why_down()) from None
                except TimeoutError:
                    may_be = "" if method == "GET" else "it may still be carried out, see `serve status`"
                    raise self.waiting.overdue(allowed_s, may_be, self._why(path)) from None
                except UnreachableError as error:
                    if self.waiting.now() - began < allowed_s:
                        raise
                    unreachable = Reason("unreachable", str(error), CHECK_NETWORK)
                    raise self.waiting.overdue(allowed_s, "", unreachable) from None
                except RefusedError as error:
                    if error.status != GATEWAY_TIMEOUT:
                        raise
                    raise self.waiting.overdue(allowed_s, str(error), self._why(path)) from None
                time.sleep(POLL_S)  # it has died, and its supervisor is about to start it again; or it starts
        raise self.waiting.overdue(allowed_s, "", self._why(path))

    def _why_down(self) -> str:
        """Return why no controller of this home responds, after some patience."""
        reason = why_not_to_start(self._home)
        if reason is not None:
            return reason
        if not is_held(self._home.lock):
            return self._why_ended() or ControllerDownError.__doc__ or ""
        found = self.why_silent()
        return f"the controller does not respond: {found.sentence}; {found.next_step}"

    def _why_ended(self) -> str:
        """Return what the last controller said if it ended for good, and so no other one starts by itself."""
        with suppress(OSError):
            why = self._home.why_ended.read_text(errors="replace").strip()
            return f"the controller is not running: {why}" if why else ""
        return ""

    def _why(self, path: str = "") -> Reason:
        """Return what a call waits for, as far as the controller or its home says."""
        try:
            content, _ = self._call_once("GET", "/v1/activity", None, None, ASK_TIMEOUT_S, {})
            return of_activity(json.loads(content), path)
        except RefusedError as error:
            return Reason("unknown", f"it responds, and does not say what it does ({error})", LOG_HINT)
        except UnreachableError as error:
            return Reason("unreachable", str(error), CHECK_NETWORK)
        except (ControllerDownError, TimeoutError):
            if self._remote is None:
                return self.why_silent()
        return Reason(
            "silent",
            f"{self.where} takes connections and responds to none",
            "run `serve controller status` on its host",
        )

    def why_silent(self) -> Reason:
        """Return what the process of this home's controller is doing while its API does not respond."""
        home = self._home
        pid = _pid(home) if is_held(home.lock) else None
        phase = read_phase(home.controller_phase) if pid is not None else None
        pid = int(phase["pid"]) if phase is not None else pid
        return of_home(phase, SystemClock().now(), pid, _state(pid), kept=is_held(home.supervisor_lock))

    def _call_once(
        self,
        method: str,
        path: str,
        body: object,
        query: Mapping[str, str] | None,
        timeout_s: float,
        more: Mapping[str, str],
    ) -> tuple[bytes, http.client.HTTPMessage]:
        target = urllib.parse.quote(path) + ("?" + urllib.parse.urlencode(query) if query else "")
        connection = self._connection(timeout_s)
        try:
            response, content = self._exchange(connection, method, target, body, more)
        finally:
            connection.close()
        return content, response.headers

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        body: object,
        more: Mapping[str, str],
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Return the response and its content, and leave the connection open."""
        remote = self._remote
        try:
            connection.connect()
            token = self._token_for(connection)
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            headers.update(more)
            raw = body if body is None or isinstance(body, bytes) else json.dumps(body)
            connection.request(method, target, raw, headers)
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            is_overdue = isinstance(error, TimeoutError) and (remote is None or connection.sock is not None)
            connection.close()
            if is_overdue:
                raise
            if remote:
                raise UnreachableError(
                    f"the controller at {remote.url} does not respond: {str(error) or 'timed out'}"
                ) from None
            if isinstance(error, FileNotFoundError | ConnectionRefusedError):
                raise _NotReachedError from None
            if method == "GET":
                raise _NotReachedError from None
            raise ControllerDownError(ControllerDownError.__doc__) from None
        if response.status >= 400:
            connection.close()
            raise RefusedError(response.status, _reason(response.status, content))
        return response, content

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._remote is None:
            return _Connection(self._home.controller_socket, timeout_s)
        if self._remote.is_ssh:
            from skyserve_cli.controller.api.over_ssh import connection_to  # loads an SSH library

            return connection_to(self._remote, self._home, timeout_s)
        if self._remote.is_kubernetes:
            from skyserve_cli.controller.api.over_kubernetes import connection_to as connection_to_pod

            return connection_to_pod(self._remote, timeout_s)
        return self._remote.connection(timeout_s)

    def _token_for(self, connection: http.client.HTTPConnection) -> str:
        """Return the token for calls on a connection that is open: over SSH and in Kubernetes the other side has sent it."""
        sent: str | None = getattr(connection, "token", None)
        return sent or (self._remote.token if self._remote else self._home.token())


def _pid(home: Home) -> int:
    """Return the process of the controller; 0 if its home does not say."""
    try:
        return int(json.loads(home.controller_address.read_text())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _state(pid: int | None) -> str:
    """Return the letter of a process's state; empty where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _flags(down: bool, ended: bool, name: str) -> dict[str, str]:
    flags = {flag: "1" for flag, wanted in (("all", down), ("ended", ended)) if wanted}
    return flags | ({"name": name} if name else {})


class _Connection(http.client.HTTPConnection):
    """To the controller's socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("controller", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = unix_socket.connected(self._path, self.timeout)


def _reason(status: int, content: bytes) -> str:
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return f"the controller returned {status}"
