"""Values about a request: how it arrived, how it finished, and what it has collected for its report."""

from __future__ import annotations

from enum import Enum
from typing import Final

from lb.core.adapters import Operation
from lb.core.api_keys import Admission
from lb.core.hop import RequestHop
from lb.core.residency import ANYWHERE, Zones
from lb.http.messages import RequestHead
from lb.observe.explain import Explanation
from lb.stream.resources import Resource
from lb.stream.resume_state import ResumeState
from policies.routing.base import RequestView


class Outcome(Enum):
    """How a request finished, as its client sees it."""

    WHOLE = "whole"  # it has the whole response of a target
    REFUSED = "refused"  # it has an error response of ours
    ERROR_EVENT = "error_event"  # its stream ended with an error event
    CUT = "cut"  # its response broke off after the first byte
    CLIENT_GONE = "client_gone"
    TUNNEL_CLOSED = "tunnel_closed"


class Arrival:
    """A request as it arrived: everything about it that does not change. No tuple, which takes much longer to make."""

    __slots__ = (
        "adapter",
        "admission",
        "at",
        "brings_ids",
        "choices",
        "continues",
        "cors",
        "explanation",
        "head",
        "hop",
        "lines",
        "model",
        "policy",
        "request_id",
        "resource",
        "resume_state",
        "span",
        "streams",
        "view",
        "zones",
    )

    def __init__(
        self,
        at: float,
        head: RequestHead,
        request_id: bytes,
        view: RequestView,
        model: str,
        admission: Admission,
        explanation: Explanation,
        policy: str | None = None,
        span: str = "",
        continues: bool = True,
        resume_state: ResumeState | None = None,
        cors: bytes | None = None,
        lines: bytes = b"",
        hop: RequestHop | None = None,
        zones: Zones = ANYWHERE,
        resource: Resource | None = None,
        brings_ids: bool = False,
        streams: bool = False,
        choices: int = 1,
    ) -> None:
        self.at = at
        self.head = head
        self.request_id = request_id
        self.view = view
        self.model = model
        self.admission = admission
        self.explanation = explanation
        self.policy = policy  # requested by the client, or by which its session goes
        self.span = span
        self.continues = continues  # the client has not forbidden to resume its stream
        self.resume_state = resume_state
        self.cors = cors  # header lines of any response to it; None if CORS is off
        # Header lines of the response, each with its CRLF: a cookie, what is left of the key's limits.
        self.lines = lines
        self.hop = hop  # of a request that a peer has forwarded
        self.zones = zones  # of its residency
        self.resource = resource  # which it names, and which one target has
        self.brings_ids = brings_ids  # its response may be of a resource that is on one target from now on
        self.streams = streams  # a model's API, and a stream of events was requested
        self.choices = choices  # how many responses were requested in one
        self.adapter: Operation | None = None  # which it asks for, on all targets


class Ending:
    """What a request collects for its report."""

    __slots__ = (
        "bytes_out",
        "continued",
        "error",
        "first_at",
        "inexact",
        "last_target",
        "queued_s",
        "sent_at",
    )

    def __init__(self) -> None:
        self.bytes_out = 0
        self.continued = 0
        self.error = ""
        self.first_at: float | None = None
        self.inexact = ""
        self.last_target = ""
        self.queued_s = 0.0
        self.sent_at: float | None = None  # when the target of the present attempt got the request


class ChargeReason(str, Enum):
    """Where the tokens come from that a request is charged."""

    REPORTED = "reported"  # by the engine
    COUNTED = "counted"  # of the response that was passed on; the prompt is estimated
    ESTIMATED = "estimated"  # by how long the engine was at it
    REFUSED = "refused"  # nothing: no engine served it
    NOT_SENT = "not_sent"  # nothing: no engine had it
    NO_TOKENS = "no_tokens"  # nothing: work that is not counted in tokens


class TokensSpent:
    """Tokens of a request that is over. `reported`: the engine counted them."""

    __slots__ = ("out", "prompt", "reason", "reported")

    def __init__(self, prompt: int, out: int, reason: ChargeReason) -> None:
        self.prompt = prompt
        self.out = out
        self.reason = reason
        self.reported = reason is _REPORTED


_REPORTED: Final = ChargeReason.REPORTED
NOTHING_SPENT: Final = TokensSpent(0, 0, ChargeReason.NO_TOKENS)
