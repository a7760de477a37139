"""How much work a request is, as far as a load balancer can estimate it without a tokenizer."""

from __future__ import annotations

from policies.routing.base import RequestView

BYTES_PER_TOKEN = 4  # of English text; GORGO's fallback counts the same way
FASTEST_S_PER_TOKEN = 0.001  # no engine writes one response faster


def prompt_bytes(request: RequestView) -> int:
    """Return the size of the prompt; of the whole body, if the prompt has not been looked at."""
    return request.body_bytes if request.prompt is None else len(request.prompt)


def streamed(answer_s: float, tokens: int | None) -> bool:
    """Return whether a response that took `answer_s` from its first byte to its last came as it was written.

    The first byte of a stream says when the prompt was done; that of a response in one piece says when
    everything was.
    """
    return answer_s >= FASTEST_S_PER_TOKEN * (tokens or 10)
