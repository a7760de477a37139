"""Heads of requests and responses: read strictly by llhttp, rewritten line by line for the next hop.

*Reading.* A head is cut off at the first empty line and given to llhttp, which must find its end exactly there.
Heads refused for that or for any other reason (bare line feeds, folded lines, spaces before colons, two lengths,
a length with a transfer coding, codings other than chunked) never reaches the next hop, so the two hops cannot
disagree on where a message ends: that is what request smuggling needs. What llhttp is generous with is checked here:
the first line, character by character, and that it has seen as many header lines as we have.

*Rewriting.* Lines are passed as they came, in order, but for those of one hop (RFC 9110 §7.6.1), those that
`Connection` names, and those that are ours to set:

- `Host` is preserved: what stands behind is the user's own application, and frameworks compare `Origin` with it. A
  target addressed by https gets its own name, since TLS terminators route on it.
- `X-Forwarded-For`, `-Proto` and `-Host` are set, and `X-Real-IP` and `Forwarded` are dropped, for anyone can write
  them. From a trusted proxy `X-Forwarded-For` is appended to instead, and the others pass. `X-Request-Id` is kept or created. `Via` is not added: engines do not read it, and it costs bytes.
- `Content-Length`, or `Transfer-Encoding: chunked`, is written by us from what has been understood.
- `X-SkyServe-*` is for the load balancer and ends here.
- Of names that mean something here, a spelling with underscores ends here as well: to CGI's successors (WSGI) `Content_Length`
  is `Content-Length`.

What was read is remembered (`remembered_heads`).
"""

from __future__ import annotations

from lb.http.head_lines import END, HeadError
from lb.http.remembered_heads import MAX_REMEMBERED, Reader
from lb.http.request_head import Hop, RequestHead, read_request, request_bytes
from lb.http.response_head import ResponseHead, opens_websocket, read_response, response_bytes

__all__ = [
    "END",
    "MAX_REMEMBERED",
    "HeadError",
    "Hop",
    "Reader",
    "RequestHead",
    "ResponseHead",
    "opens_websocket",
    "read_request",
    "read_response",
    "request_bytes",
    "response_bytes",
]
