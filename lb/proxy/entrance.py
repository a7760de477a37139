"""Where requests come in: who may enter is decided on the head, what a request asks for once its body is here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lb.config.options import Continue
from lb.core.api_keys import Admission, ApiKeyStore, Unauthorized
from lb.core.targets import TargetTable
from lb.core.tenant import Limited
from lb.http.messages import RequestHead
from lb.observe.explain import Explanations
from lb.observe.metrics import Metrics
from lb.proxy.ending import Arrival
from lb.proxy.ports import Refusal
from lb.proxy.resumable_relay import ResumeState
from lb.stream import openai_request
from lb.stream.model_name import model_of, names_a_model
from lb.stream.openai_request import NOT_PARSED, ParsedRequest
from lb.stream.token_usage import BYTES_PER_TOKEN
from policies.routing.base import RequestView
from policies.routing.registry import POLICIES


class RequestOverrides(NamedTuple):
    """What a client may ask of the load balancer: the X-SkyServe-* headers, each of which ends here."""

    policy: str | None = None
    session: str = ""
    continues: bool = True


_NO_OVERRIDES = RequestOverrides()
_NOT_SERVED = Refusal(404, "not_found", "Paths under /-/ are not served on this port.")
_TRACE = Refusal(
    405, "method_not_allowed", "TRACE is not served: it would show the client's headers to scripts."
)


class Gate:
    """Lets requests in, or refuses them."""

    def __init__(
        self,
        table: TargetTable,
        api_keys: ApiKeyStore,
        metrics: Metrics,
        explanations: Explanations,
        id_prefix: str,
        begin_span: Callable[[str], str] | None,
    ) -> None:
        self._table = table
        self._api_keys = api_keys
        self._metrics = metrics
        self._explanations = explanations
        self._id_prefix = id_prefix
        self._begin_span = begin_span
        self._number = 0

    def check(self, head: RequestHead, now: float) -> Refusal | Admission:
        """Decide on the head alone, before a byte of the body is kept or asked for."""
        target = head.target
        if target.startswith(b"/-/") or target == b"/-" or target.startswith(b"/-?"):
            return _NOT_SERVED
        if head.method == b"TRACE":
            return _TRACE
        verdict = self._api_keys.admit_head(head.credentials, now)
        if isinstance(verdict, Admission):
            return verdict
        counts = self._metrics.counts
        if isinstance(verdict, Unauthorized):
            counts.unauthorized += 1
            text = "The API key is not known." if verdict.given else "An API key is needed."
            return Refusal(401, "invalid_api_key", text)
        return self._limited(verdict)

    def _limited(self, verdict: Limited) -> Refusal:
        self._metrics.counts.limited += 1
        return Refusal(429, "rate_limit_exceeded", verdict.message, verdict.retry_after_s)

    def arrival(
        self, head: RequestHead, body: bytes, admission: Admission, body_left: bool, now: float
    ) -> Arrival | Refusal:
        """Returns what the request asks for, or why it is refused after all."""
        for name in admission.carried_by:
            head = head.without(name)  # the key was for us
        overrides = _NO_OVERRIDES if head.ours is None else self._overrides(head)
        if isinstance(overrides, Refusal):
            return overrides
        path = head.path
        parsed: ParsedRequest = NOT_PARSED
        prompt: bytes | None = None
        scope = ""
        routed = self._table.models.mixed
        session = overrides.session or (head.session.decode("latin-1") if head.session else "")
        if body and head.method == b"POST" and openai_request.for_model(path):
            prompts = self._table.needs_prompt or overrides.policy is not None
            if prompts or routed or admission.tenant or (b'"stream"' in body and not body_left):
                parsed = openai_request.read(body)
            if prompts:
                prompt = openai_request.prompt_of(parsed.json, body)
            scope = f"{admission.tenant}\x00{parsed.model}"
            session = session or parsed.user
        if routed and body and head.method == b"POST" and names_a_model(path):
            model = model_of(parsed, body)
        else:
            model = parsed.model
        if admission.tenant and parsed is not NOT_PARSED:
            prompt_tokens = (len(prompt) if prompt is not None else len(body)) // BYTES_PER_TOKEN
            limited = self._api_keys.reserve(admission, prompt_tokens, parsed.most_tokens, now)
            if limited is not None:
                return self._limited(limited)
        self._number += 1
        own_id = f"{self._id_prefix}-{self._number}"  # a client's may occur twice at once
        if head.request_id:
            request_id, shown_id = head.request_id, head.request_id.decode("ascii")
        else:
            request_id, shown_id = own_id.encode(), own_id
        method, plain = head.method_text, head.path_text
        view = RequestView(own_id, method, plain, len(body), prompt, scope, session, parsed.max_tokens)
        span = ""
        if self._begin_span is not None:
            span = self._begin_span(head.traceparent.decode("latin-1"))
            head = head.without(b"traceparent")  # targets are told of our span instead
        continues = overrides.continues and not body_left
        options = self._table.table.continuation
        resume_state = None
        if (
            parsed.stream
            and parsed.json is not None
            and continues
            and options.mode is not Continue.OFF
            and path in (openai_request.CHAT, openai_request.COMPLETIONS)
        ):
            resume_state = ResumeState(path, parsed, body, options)
        return Arrival(
            at=now,
            head=head,
            request_id=request_id,
            view=view,
            model=model,
            admission=admission,
            explanation=self._explanations.begin(shown_id, method, plain, now),
            policy=overrides.policy,
            span=span,
            continues=continues,
            resume_state=resume_state,
        )

    def _overrides(self, head: RequestHead) -> RequestOverrides | Refusal:
        """Read the X-SkyServe-* headers."""
        ours = head.ours or {}
        policy = ours.get(b"policy") if self._table.table.access.overrides else None
        if policy is not None and policy.decode("latin-1") not in POLICIES:
            return Refusal(400, "unknown_policy", "X-SkyServe-Policy names no routing policy.")
        return RequestOverrides(
            policy.decode("latin-1") if policy is not None else None,
            ours.get(b"session", b"")[: openai_request.MAX_SESSION_BYTES].decode("latin-1"),
            ours.get(b"continue", b"").lower() != b"off",
        )
