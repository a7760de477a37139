"""AWS on loopback: the account of `aws_ec2` behind HTTP, for the unmodified SDK, with trouble to order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from socket import SHUT_RDWR
from threading import RLock, Thread
from typing import Any

from werkzeug.serving import WSGIRequestHandler, make_server

from tests.clouds.api_limits import Limits
from tests.clouds.aws.aws_account import ACCOUNT
from tests.clouds.aws.aws_ec2 import StrictEc2
from tests.clouds.aws.aws_policy import lacking, needs_of, untagged
from tests.clouds.aws.aws_wire import Call, Refusal, call_of, refused


class VirtualTime:
    """A clock that sleeps move."""

    def __init__(self, start: float = 1_800_000_000.0) -> None:
        self._at = start
        self._lock = RLock()

    def now(self) -> float:
        with self._lock:
            return self._at

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._at += seconds


@dataclass(slots=True)
class Fault:
    action: str
    code: str  # "" is a connection that is cut
    times: int
    after: bool
    region: str | None
    message: str


@dataclass(slots=True)
class AwsWorld(StrictEc2):
    """The controls are the account's and these; `calls` is what was asked, in order."""

    denied: set[str] = field(default_factory=set)  # actions that the policy does not allow
    policy: Mapping[str, Any] | None = None  # an IAM policy; None allows everything
    limits: Limits = field(
        init=False
    )  # by action, region by region; "Describe" is of all that have none of their own
    calls: list[Call] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # of our own: a world with any is broken
    url: str = ""
    clock_off_s: float = 0.0  # how far EC2's clock is ahead of the caller's
    _faults: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.limits = Limits(self.now)

    @contextmanager
    def running(self) -> Iterator[AwsWorld]:
        """Serve on a free port of loopback, from nothing."""
        self.open()
        handler = type("Handler", (_Quiet,), {"unix_now": lambda _: self.now() + self.clock_off_s})
        server = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=handler)
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which every client of AWS comes here."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AKIATESTTESTTESTTEST",
            "AWS_SECRET_ACCESS_KEY": "of-nobody",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def fail(
        self,
        action: str,
        code: str,
        *,
        times: int = 1,
        after: bool = False,
        region: str | None = None,
        message: str = "",
    ) -> None:
        """Refuse the next calls; with `after`, what was asked is done first."""
        self._faults.append(Fault(action, code, times, after, region, message))

    def cut(self, action: str, *, times: int = 1, after: bool = False) -> None:
        """The connection breaks: before the request is read, or with the response on its way."""
        self.fail(action, "", times=times, after=after)

    def calm(self) -> None:
        """No trouble, and room for everybody."""
        self._faults.clear()
        self.denied.clear()
        self.limits.rates = {}
        self.room.clear()
        self.quota_vcpus.clear()

    def asked(self, action: str) -> list[Call]:
        return [call for call in self.calls if call.action == action]

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Any:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        call = call_of(environ, body)
        self.calls.append(call)
        try:
            with self.limits.call(self._group(call), call.region) as is_let_in:
                self._trouble(call, after=False)
                if not is_let_in:
                    raise Refusal("RequestLimitExceeded", "Request limit exceeded.")
                with self.lock:
                    response, hooks = self.answer(call, environ)
                for hook in hooks:
                    hook()
                if call.action.endswith("SecurityGroupIngress"):
                    self.on_rules()
                self._trouble(call, after=True)
            call.responded = "ok" if response.status_code < 400 else "refused"
        except Refusal as refusal:
            if not refusal.code:
                call.responded = "lost"
                environ["werkzeug.socket"].shutdown(SHUT_RDWR)
                raise ConnectionAbortedError from refusal
            call.responded = refusal.code
            response = refused(call, refusal)
        except Exception as error:
            self.errors.append(f"{call.action}: {error!r}")
            raise
        return response(environ, start_response)

    def _trouble(self, call: Call, *, after: bool) -> None:
        with self.lock:
            for fault in self._faults:
                is_meant = fault.action in (call.action, "*") and fault.region in (None, call.region)
                if is_meant and fault.times > 0 and fault.after == after:
                    fault.times -= 1
                    raise Refusal(fault.code, fault.message)
            if after:
                return
            if call.action in self.denied:
                raise Refusal(
                    "AccessDeniedException" if call.is_json else "UnauthorizedOperation",
                    f"You are not authorized to perform this operation. User: arn:aws:iam::{ACCOUNT}:user/u is not "
                    f"authorized to perform: {call.service}:{call.action} on resource: *",
                )
            if self.policy is not None:
                need = lacking(self.policy, needs_of(call, self.tags_of))
                if need is not None:
                    raise Refusal(
                        "AccessDeniedException" if call.is_json else "UnauthorizedOperation",
                        f"You are not authorized to perform this operation. User: arn:aws:iam::{ACCOUNT}:user/u is "
                        f"not authorized to perform: {need.action} on resource: {need.resource} because no "
                        "identity-based policy allows the action",
                    )
            kind = untagged(call, self.required_tags)
            is_plain = call.params.get("BlockDeviceMapping.1.Ebs.Encrypted") != "true"
            if call.action == "RunInstances" and self.requires_encryption and is_plain:
                kind = "volume"
            if kind is not None:
                raise Refusal(
                    "UnauthorizedOperation",
                    f"You are not authorized to perform this operation. User: arn:aws:iam::{ACCOUNT}:user/u is not "
                    f"authorized to perform: ec2:{call.action} on resource: arn:aws:ec2:{call.region}:{ACCOUNT}:{kind}/* "
                    "with an explicit deny in a service control policy",
                )
            if call.params.get("DryRun") == "true":
                raise Refusal("DryRunOperation", "Request would have succeeded, but DryRun flag is set.")

    def _group(self, call: Call) -> str:
        """EC2 counts each action by itself."""
        is_read = call.action.startswith("Describe") and call.action not in self.limits.rates
        return "Describe" if is_read else call.action


class _Quiet(WSGIRequestHandler):
    """Logs neither requests nor connections that we cut on purpose. Sends the world's time."""

    def unix_now(self) -> float:
        raise NotImplementedError

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(self.unix_now())

    def log(self, type: str, message: str, *args: Any) -> None:
        if type == "error" and "ConnectionAborted" not in message % args:
            super().log(type, message, *args)
