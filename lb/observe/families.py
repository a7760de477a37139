"""The families of metrics: their names, what they mean, and the attributes of `lb.observe.counters` that they are read from."""

from __future__ import annotations

from typing import NamedTuple

AGENT_HELP = {
    "client_connections": "Open connections of clients.",
    "max_client_connections": "How many there may be; more are refused.",
    "buffered_bytes": "Bytes kept of requests' bodies and what was parsed from them.",
    "stream_bytes": "Bytes of memory that hold what has been sent of running streams, to resume them elsewhere.",
    "buffer_limit_bytes": "How many there may be of both; more bodies are refused.",
    "evicted_bodies": "Bodies refused to make room for another tenant's.",
    "internal_errors": "Exceptions in the load balancer's own code, each of which ended one request.",
    "retries_refused": "Retries that the retry budget did not allow.",
    "keys_file_keys": "API keys of the file that the service names, as last read.",
    "keys_file_broken": "1 while that file cannot be used as it is: the last good keys stay in force.",
    "handshakes_failed": "Connections of clients that were closed before their TLS handshake was complete.",
}
AGENT_COUNTERS = frozenset({"evicted_bodies", "internal_errors", "retries_refused", "handshakes_failed"})
CACHE_GAUGES = {
    "cache_followed_targets": "Targets whose cache events are followed.",
    "cache_complete_targets": "Those of which the whole cache is known.",
    "cache_refused_targets": "Targets whose cache events cannot be followed.",
    "cache_blocks": "Distinct blocks of tokens that are known to be cached, or belong to prompts that have passed.",
    "cache_links": "Texts of prompts that are known in tokens.",
}
CACHE_COUNTERS = {
    "cache_measured_requests": "Requests whose engine reported how much of the prompt was cached.",
    "cache_measured_prompt_tokens": "Tokens of their prompts.",
    "cache_hit_tokens": "Tokens of them that were cached.",
    "cache_predicted_tokens_by_events": "Tokens of them that were expected to be cached, by events.",
    "cache_predicted_tokens_by_forwards": "Tokens of them that were expected to be cached, by what had been sent.",
    "cache_error_by_events": "Sum of the errors of those requests, each as a share of its prompt, by events.",
    "cache_error_by_forwards": "Sum of the errors of those requests, by what had been sent.",
    "cache_block_events": "Blocks that engines reported as stored or removed.",
    "cache_event_gaps": "How often batches of events were missing and were requested again.",
    "cache_engine_restarts": "New processes of engines that were noticed by their events.",
    "cache_unreadable_batches": "Batches of events that could not be read.",
    "cache_tokenized_prompts": "Prompts whose tokens were requested from engines.",
    "cache_prompts_not_tokenized": "Prompts that were beyond the limit of such requests, or got no tokens.",
}
AGENT_HELP |= CACHE_GAUGES | CACHE_COUNTERS
AGENT_COUNTERS |= CACHE_COUNTERS.keys()


class Family(NamedTuple):
    """A family of metrics and the attribute it is read from.

    `kind` names the label of an attribute that counts by kind.
    """

    attribute: str
    name: str
    help: str
    kind: str = ""


OF_AGENT = (
    Family("requests", "requests", "Requests that arrived, whatever became of them."),
    Family("codes", "responses", "Responses to clients, by status.", "code"),
    Family(
        "errors",
        "request_errors",
        "Failed requests, by the code of the error.",
        "code",
    ),
    Family(
        "local_failures", "local_connect_failures", "Connects that failed for want of something of this host."
    ),
    Family("duration", "request_duration_seconds", "From a request's arrival to the end of its response."),
    Family("rejected", "rejected_requests", "Requests turned away because no target could take them."),
    Family(
        "residency_denied",
        "residency_denied",
        "Requests that no replica of their residency zone could take in time.",
        "zone",
    ),
    Family("limited", "limited_requests", "Requests turned away by the limits of their key."),
    Family("unauthorized", "unauthorized_requests", "Requests without a known key."),
    Family("client_gone", "client_gone_requests", "Requests whose client left before the end."),
    Family("cut", "cut_streams", "Responses that broke off after their first byte."),
    Family("retries", "retries", "Attempts beyond a request's first."),
    Family("moves", "moves", "Waiting attempts called back because their target was lost or silent."),
    Family(
        "deadlines",
        "deadline_requests",
        "Requests with a deadline, by what became of it: kept, late, or shed (refused, since it could not be kept).",
        "outcome",
    ),
    Family("queued_total", "holds", "Times a request had to wait for a target."),
    Family("continued", "continuations", "Broken streams that went on on another target."),
    Family(
        "continued_inexactly",
        "inexact_continuations",
        "Of those, the ones whose tokens need not be those of an undisturbed stream.",
        "reason",
    ),
    Family("continue_refused", "continuation_refusals", "Broken streams that could not go on.", "reason"),
    Family("handed_over", "handovers", "Streams handed to another target before theirs was taken away."),
    Family("warmups", "warmups", "New targets whose cache was filled, by why that ended.", "why"),
    Family("warmed_prefixes", "warmed_prefixes", "Prefixes of prompts that new targets computed beforehand."),
    Family("warmed_bytes", "warmed_prompt_bytes", "Bytes of those prefixes that no earlier one had."),
    Family("warming_s", "warming_seconds", "How long the caches of new targets were filled, in all."),
    Family("stalled", "stalled_streams", "Streams whose target fell silent."),
    Family("prompt_bytes", "prompt_bytes", "Bytes of prompts that were looked up for routing."),
    Family("matched_bytes", "matched_prompt_bytes", "Those thought to be in the chosen target's cache."),
    Family("tokens_in", "input_tokens", "Prompt tokens, as engines count them."),
    Family("tokens_out", "output_tokens", "Generated tokens, as engines count them."),
    Family("bytes_out", "response_bytes", "Bytes of response bodies sent to clients."),
    Family("queue_wait", "queue_wait_seconds", "How long requests that had to wait for a target waited."),
    Family("ttft", "time_to_first_token_seconds", "From a request's arrival to its first byte or token."),
)
OF_TARGET = (
    Family("attempts", "attempts", "Attempts on targets."),
    Family("failures", "failures", "Attempts on targets that failed.", "kind"),
    Family("ejections", "ejections", "Times a target was left out for its failures."),
    Family("tokens_in", "target_input_tokens", "Prompt tokens, as the target's engine counts them."),
    Family("tokens_out", "target_output_tokens", "Generated tokens, as the target's engine counts them."),
    Family(
        "ttfb",
        "time_to_first_byte_seconds",
        "From the arrival of a request to the first byte of its response's body.",
    ),
    Family("inter_token", "inter_token_seconds", "Between two tokens of a stream, on average over it."),
    Family("duration", "attempt_duration_seconds", "From an attempt's beginning to its end."),
)


OF_KEY_AND_MODEL = (
    Family("requests", "key_requests", "Requests with this key that were let in, counted when they end."),
    Family("tokens_in", "key_input_tokens", "Prompt tokens of requests with this key."),
    Family("tokens_out", "key_output_tokens", "Tokens generated for requests with this key."),
)
OF_KEY = (
    Family(
        "refusals", "key_refusals", "Requests with this key that got an error response of ours.", "reason"
    ),
)
