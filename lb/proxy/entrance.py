"""Where requests come in: who may enter is decided on the head, what a request requests once its body is here."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from lb.config.options import Continue, CookieMode
from lb.core.api_keys import Admission, ApiKeyStore, Unauthorized
from lb.core.hop import NAME as HOP
from lb.core.hop import RequestHop
from lb.core.model_costs import ModelCosts
from lb.core.quota import Limited
from lb.core.residency import Zones
from lb.core.targets import TargetTable
from lb.core.warming import LARGEST_BYTES, PromptSample, PromptSamples
from lb.http import error_responses, session_cookie
from lb.http.api_paths import ADAPTERS, Work, for_model, names_a_model, work_of
from lb.http.cors import CorsRules
from lb.http.deadline_headers import PROBLEM, read_deadline
from lb.http.key_carriers import QUERY, keys_in_query
from lb.http.messages import RequestHead
from lb.http.rate_limits import lines_of
from lb.observe.explain import Explanations
from lb.observe.metrics import Metrics
from lb.proxy.ending import Arrival
from lb.proxy.ports import Downstream
from lb.proxy.rejections import Rejection
from lb.stream import openai_request, resources
from lb.stream.dialects import DIALECTS
from lb.stream.model_name import model_of
from lb.stream.openai_request import NOT_PARSED, UNREADABLE, ParsedRequest
from lb.stream.request_size import size_of
from lb.stream.resources import Resource
from lb.stream.resume_state import ResumeState
from lb.stream.session_fields import SessionFields
from lb.stream.warming_request import PATHS as SAMPLED
from policies.routing.base import RequestView
from policies.routing.names import GO_BY_SESSIONS, SERVICE_POLICY, SESSION_POLICY
from policies.routing.registry import POLICIES


class RequestOverrides(NamedTuple):
    """What a client may request of the load balancer: the X-SkyServe-* headers, none of which is forwarded."""

    policy: str | None = None
    session: str = ""
    continues: bool = True


_NO_OVERRIDES: Final = RequestOverrides()
_PARSED_BYTES: Final = 256 * 1024  # of a body that is parsed for a field or two
_CACHE_FIELDS: Final = ("prompt_cache_key", "session_id")  # by which clients ask for the same cache
_HEALTH: Final = b"/-/healthz"
_READY: Final = b"/-/ready"
_WELL_KNOWN: Final = b"/.well-known/skyserve"
_NOT_SERVED: Final = Rejection(
    404, "not_found", "Of the paths under /-/ this port serves /-/healthz and /-/ready."
)
_READ_ONLY: Final = Rejection(405, "method_not_allowed", "This path is for GET and HEAD.")
_DOT_SEGMENT: Final = (
    re.compile(  # `.` or `..` as a server reads it that decodes, or takes a backslash for a slash
        rb"(?:/|\\|%2f|%5c)(?:\.|%2e){1,2}(?=/|\\|%2f|%5c|;|%3b|$)", re.IGNORECASE
    )
)
_DOTS: Final = Rejection(400, "dot_segments", "The path must not contain the segments . and .. here.")
_READING: Final = (b"GET", b"HEAD", b"OPTIONS")
_BAD_DEADLINE: Final = Rejection(400, "invalid_deadline", PROBLEM)
_UNREADABLE: Final = Rejection(
    400, "invalid_json", "The body is not a JSON object as RFC 8259 has it: UTF-8, without NaN and Infinity."
)
_ENCODED: Final = Rejection(415, "unsupported_content_encoding", "Send the body without Content-Encoding.")
_AMBIGUOUS: Final = Rejection(400, "duplicate_fields", "A field is in the body more than once.")
_TOO_LONG_TO_COUNT: Final = Rejection(
    413,
    "request_too_large",
    "The body is too long for a key with a limit of tokens: it is not read as a whole.",
)
_TRACE: Final = Rejection(
    405, "method_not_allowed", "TRACE is not served: it would show the client's headers to scripts."
)


class RequestAdmission:
    """Lets requests in, or refuses them."""

    def __init__(
        self,
        table: TargetTable,
        api_keys: ApiKeyStore,
        costs: ModelCosts,
        metrics: Metrics,
        explanations: Explanations,
        id_prefix: str,
        begin_span: Callable[[str], str] | None,
        ready: Callable[[], bool],
    ) -> None:
        """`ready` returns True if a request that came now would find a healthy target."""
        self._table = table
        self._api_keys = api_keys
        self._costs = costs
        self._metrics = metrics
        self._explanations = explanations
        self._id_prefix = id_prefix
        self._begin_span = begin_span
        self._ready = ready
        self.samples = PromptSamples(table.table)
        self.cors: CorsRules | None = None
        self.apply()
        self._number = 0

    def apply(self) -> None:
        """Another table is in force."""
        self.samples.apply(self._table.table)
        cors = self._table.table.cors
        self._keys_in_query = self._table.table.access.keys_in_query
        self._entrance = frozenset(self._table.table.residency)
        regions = self._table.table.regions
        endpoints = () if regions is None else regions.endpoints
        rows = [{"url": one.url, "region": one.region, "zones": list(one.zones)} for one in endpoints]
        self._endpoints = {"service": self._table.table.service, "endpoints": rows} if rows else None
        self.cors = CorsRules(cors) if cors.origins else None
        self._cookies = self._table.table.session.cookie is CookieMode.AUTO
        slo = self._table.table.slo
        self._deadline = (slo.ttft_s, slo.tpot_s) if slo.deadlines else None  # of requests that bring none
        policy, names = self._table.table.policy, self._table.table.session.fields
        # The model is part of what a session is known by, and stands in the body.
        self._by_session = self._cookies or policy == SESSION_POLICY
        usual: tuple[str, ...] = ("user",) if self._by_session else ()
        if policy == SERVICE_POLICY:  # a session is a term of its cost, and nothing is bound by it
            usual = (*_CACHE_FIELDS, *usual)
        self._session_fields = SessionFields(names or usual)
        self._session_policy = None if policy in GO_BY_SESSIONS else SESSION_POLICY
        self._trusted = [ipaddress.ip_network(one) for one in self._table.table.trusted_proxies]
        # Above its base path a target may serve other services.
        self._has_base_path = any(urlsplit(one.url).path.strip("/") for one in self._table.table.targets)

    def is_trusted_proxy(self, peer: str) -> bool:
        """Return True if this address is one of a proxy whose word on its own clients is taken."""
        if not self._trusted:
            return False
        try:
            address = ipaddress.ip_address(peer.partition("%")[0])
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address):
            address = address.ipv4_mapped or address  # as a socket for both sees IPv4
        return any(address in network for network in self._trusted)

    def check(self, head: RequestHead, now: float) -> Rejection | Admission | bytes:
        """Decide on the head alone, before a byte of the body is kept or requested. Bytes are a whole response."""
        cors = self.cors
        if cors is not None and head.method == b"OPTIONS":  # browsers send preflights without a key
            decision = cors.decide(head.method, head.origin, head.cors_method, head.cors_headers)
            if decision.status == 204:
                return error_responses.raw_text(204, "", more_lines=decision.lines)
            if decision.status is not None:
                return Rejection(decision.status, "cors_rejected", f"CORS: {decision.problem}.")
        path = head.path
        if path.startswith(b"/-/") or path == b"/-":
            return self._own_path(head)
        if self._endpoints is not None and path == _WELL_KNOWN and head.method == b"GET":
            return error_responses.raw_json(self._endpoints, b"" if cors is None else cors[head.origin])
        if head.method == b"TRACE":
            return _TRACE
        if self._has_base_path and _DOT_SEGMENT.search(path):
            return _DOTS
        if head.slo is not None and read_deadline(*head.slo) is None:
            return _BAD_DEADLINE
        credentials = head.credentials
        if self._keys_in_query and head.target.find(b"?") >= 0:
            credentials += tuple((QUERY, key) for key in keys_in_query(head.target))
        verdict = self._api_keys.admit_head(credentials, now)
        if isinstance(verdict, Admission):
            return verdict
        counts = self._metrics.counts
        if isinstance(verdict, Unauthorized):
            counts.unauthorized += 1
            text = "The API key is not known." if verdict.given else "An API key is needed."
            return Rejection(401, "invalid_api_key", text)
        return self._limited(verdict)

    def _limited(self, verdict: Limited) -> Rejection:
        self._metrics.counts.limited += 1
        self._metrics.of_key(verdict.tenant).refusals[verdict.reason] += 1
        lines = lines_of(*verdict.left)
        code = error_responses.USED_UP if verdict.is_budget else "rate_limit_exceeded"
        return Rejection(429, code, verdict.message, verdict.retry_after_s, lines)

    def _own_path(self, head: RequestHead) -> Rejection | bytes:
        """Return whether the process serves, and whether a target would take a request.

        For load balancers and supervisors before this one, which have no key.
        """
        if head.path not in (_HEALTH, _READY):
            return _NOT_SERVED
        if head.method not in (b"GET", b"HEAD"):
            return _READ_ONLY
        well = head.path == _HEALTH or self._ready()
        return error_responses.raw_text(
            200 if well else 503,
            "ok\n" if well else "no replica is ready\n",
            head_only=head.method == b"HEAD",
            more_lines=b"" if self.cors is None else self.cors[head.origin],
        )

    def arrival(
        self,
        head: RequestHead,
        body: bytes,
        admission: Admission,
        client: Downstream,
        dense: bool,
        now: float,
    ) -> Arrival | Rejection:
        """Return what the request requests, or why it is refused after all. A `dense` body is not parsed."""
        if admission.carried_by:
            head = head.without_keys(admission.carried_by)  # they were for us
        overrides = _NO_OVERRIDES if head.ours is None else self._overrides(head, admission)
        if isinstance(overrides, Rejection):
            return overrides
        path, body_left, routed = head.path, client.body_left, self._table.models.mixed
        parsed, prompt, scope, session, resource, brings_ids = self._read(
            head, body, overrides, admission, body_left, dense
        )
        by_model = routed or admission.limits_models
        has_model = by_model and body and head.method == b"POST" and names_a_model(path)
        model = model_of(parsed, body) if has_model else parsed.model
        if parsed is UNREADABLE and self._table.table.access.strict_json:
            return _ENCODED if b"\r\ncontent-encoding:" in b"\r\n" + head.lines.lower() else _UNREADABLE
        if admission.reads_body or path in ADAPTERS:
            refusal = self._reserve(head, body, parsed, model, admission, body_left, now)
            if refusal is not None:
                return refusal
        if now >= self.samples.due_at and not body_left and len(body) <= LARGEST_BYTES:
            self._sample(head, body, admission, now)
        set_cookie = b""
        if self._cookies and not session and admission.hop is None:
            secure = client.hop.scheme == b"https"
            session, set_cookie = session_cookie.read_or_make(head.cookie, secure=secure)
        policy = overrides.policy or (self._session_policy if session else None)
        (own_id, request_id, shown_id), method, plain = self._ids(head), head.method_text, head.path_text
        view = RequestView(own_id, method, plain, len(body), prompt, scope, session, parsed.max_tokens)
        if head.slo is not None or self._deadline is not None:
            self._set_due(view, head, admission.hop, now)
        span = ""
        if self._begin_span is not None:
            span = self._begin_span(head.traceparent.decode("latin-1"))
            head = head.without(b"traceparent")  # targets get our span instead
        cors, continues = self.cors, overrides.continues and not body_left
        resume_state = None
        if parsed.stream and continues and parsed.json is not None:
            resume_state = self._resume_state(path, parsed, body, admission.hop)
        return Arrival(
            now,
            head,
            request_id,
            view,
            model,
            admission,
            self._explanations.begin(shown_id, method, plain, now),
            policy,
            span,
            continues,
            resume_state,
            None if cors is None or admission.hop is not None else cors[head.origin],
            set_cookie + lines_of(*admission.left()) if admission.tenant else set_cookie,
            admission.hop,
            self._zones(admission),
            resource,
            brings_ids,
            parsed.stream and path in DIALECTS,
            parsed.choices,
        )

    def _reserve(
        self,
        head: RequestHead,
        body: bytes,
        parsed: ParsedRequest,
        model: str,
        admission: Admission,
        body_left: bool,
        now: float,
    ) -> Rejection | None:
        """Take the tokens that a request is expected to use from those of its key and model."""
        if head.method in _READING and not head.websocket:
            return None
        path = head.path
        if path in ADAPTERS:
            return None if admission.may_use(path) else _ADAPTERS_FOR_ALL
        if not names_a_model(path) and _DOT_SEGMENT.search(path):
            return _DOTS  # what is allowed below a path would be allowed beside it
        work = work_of(path)
        is_known = work is Work.NONE or (work is not None and head.method == b"POST")
        if work is None or not is_known or head.websocket:  # SGLang generates by PUT, too
            return None if admission.may_use(path) else _not_counted(path)
        if work is Work.NONE:
            return None
        if body_left and work is not Work.MEDIA:
            return _TOO_LONG_TO_COUNT
        if parsed.json is not None and openai_request.is_ambiguous(parsed.json, body):
            return _AMBIGUOUS
        size = size_of(work, parsed, body)
        admission.text_bytes = 0 if size.tokens else size.text_bytes
        prompt_tokens = self._costs.of(model).prompt_tokens(size.text_bytes) + size.tokens
        limited = self._api_keys.reserve(admission, model, prompt_tokens, size.most_out, now, size.choices)
        return None if limited is None else self._limited(limited)

    def _read(
        self,
        head: RequestHead,
        body: bytes,
        overrides: RequestOverrides,
        admission: Admission,
        body_left: bool,
        dense: bool,
    ) -> tuple[ParsedRequest, bytes | None, str, str, Resource | None, bool]:
        """Return the parsed body, as far as it is needed, with its prompt and scope; the session; what is named and stored on one target.

        The last value is whether the response may name such a resource.
        """
        path = head.path
        parsed: ParsedRequest = NOT_PARSED
        prompt: bytes | None = None
        scope = ""
        session = overrides.session or (head.session.decode("latin-1") if head.session else "")
        fields, named = self._session_fields, False
        if fields and not session:
            session = fields.in_query(head.target)
            named = not session and head.method == b"POST" and fields.may_be_in(body)
        resource, brings_ids = None, path.startswith(resources.PREFIXES)
        if brings_ids:
            resource, brings_ids = resources.in_path(path), resources.makes_some(path)
            named = named or (head.method == b"POST" and resources.may_name(path, body))
        if body and head.method == b"POST" and for_model(path):
            prompts = self._table.policies.needs_prompt or overrides.policy is not None
            parses = prompts or self._table.models.mixed or bool(admission.tenant) or named
            if parses or (not body_left and (self._by_session or body.find(b'"stream"') >= 0)):
                parsed = openai_request.scan(body) if dense else openai_request.read(body)
                if parsed is NOT_PARSED and not body_left:
                    parsed = UNREADABLE
            if prompts:
                prompt = openai_request.prompt_of(parsed.json, body)
            scope = _scope(admission, parsed.model)
        if named:
            named_session, named_resource = self._named(path, parsed, body)
            session, resource = session or named_session, resource or named_resource
        return parsed, prompt, scope, session, resource, brings_ids

    def _named(self, path: bytes, parsed: ParsedRequest, body: bytes) -> tuple[str, Resource | None]:
        """Return the session and the resource that a body names."""
        json = parsed.json
        if json is None and len(body) <= _PARSED_BYTES:  # of a path that is not a model's
            json = openai_request.read(body).json
        if json is None:
            return self._session_fields.in_text(body), resources.in_text(path, body)
        return self._session_fields.in_json(json), resources.in_body(path, json)

    def _sample(self, head: RequestHead, body: bytes, admission: Admission, now: float) -> None:
        """Keep a prompt for replicas that join (see `lb.core.warming`)."""
        if head.path not in SAMPLED or head.method != b"POST":
            return
        parsed = openai_request.read(body)
        if parsed.json is not None:
            scope, prompt = _scope(admission, parsed.model), openai_request.prompt_of(parsed.json, body)
            zones = self._zones(admission)
            self.samples.add(PromptSample(now, scope, zones, parsed.model, head.path, body, prompt))

    def _zones(self, admission: Admission) -> Zones:
        return admission.zones if admission.hop is not None else admission.zones | self._entrance

    def _set_due(self, view: RequestView, head: RequestHead, hop: RequestHop | None, now: float) -> None:
        """Set the deadline of the request, or else that of the service's requests to a model."""
        deadline = self._deadline if head.method == b"POST" and for_model(head.path) else None
        if head.slo is not None:
            deadline = read_deadline(*head.slo)
        if deadline is None:
            return
        since, (ttft_s, tpot_s) = now - (0.0 if hop is None else hop.age_s), deadline
        view.due_at, view.ttft_s, view.tpot_s = since + ttft_s if ttft_s else 0.0, ttft_s, tpot_s

    def _ids(self, head: RequestHead) -> tuple[str, bytes, str]:
        """Return our own id, that of X-Request-Id, and the latter as text."""
        self._number += 1
        own_id = f"{self._id_prefix}-{self._number}"  # a client's may occur twice at once
        if head.request_id:
            return own_id, head.request_id, head.request_id.decode("ascii")
        return own_id, own_id.encode(), own_id

    def _resume_state(
        self, path: bytes, parsed: ParsedRequest, body: bytes, hop: RequestHop | None
    ) -> ResumeState | None:
        """Return the state from which this stream can resume on another target; None if streams of this kind do not resume."""
        options = self._table.table.continuation
        if options.mode is Continue.OFF or path not in DIALECTS:
            return None
        state = ResumeState(path, parsed, body, options)
        if hop is not None and hop.breaks_left is not None:
            state.breaks = max(0, options.max_breaks - hop.breaks_left)
        return state

    def _overrides(self, head: RequestHead, admission: Admission) -> RequestOverrides | Rejection:
        """Read the X-SkyServe-* headers."""
        ours = head.ours or {}
        if admission.hop is None and HOP in ours:
            self._metrics.counts.errors["forged_hop"] += 1  # only peers send it, on a port of its own
        policy = ours.get(b"policy") if self._table.table.access.overrides else None
        if policy is not None and policy.decode("latin-1") not in POLICIES:
            return Rejection(400, "unknown_policy", "X-SkyServe-Policy names no routing policy.")
        return RequestOverrides(
            policy.decode("latin-1") if policy is not None else None,
            ours.get(b"session", b"")[: openai_request.MAX_SESSION_BYTES].decode("latin-1"),
            ours.get(b"continue", b"").lower() != b"off",
        )


_ADAPTERS_FOR_ALL: Final = Rejection(
    403,
    "path_not_allowed",
    "Adapters are loaded and unloaded on all replicas, for all keys: add the path to the `paths` of a key that may do so.",
)


def _not_counted(path: bytes) -> Rejection:
    text = f"Nothing counts the tokens of {path.decode('latin-1')}, and the key has a limit of them: add the path to its `paths`."
    return Rejection(403, "path_not_allowed", text)


def _scope(admission: Admission, model: str) -> str:
    return f"{admission.tenant}\x00{model}"
