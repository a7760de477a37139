"""HTTP/1.1 as bytes (heads, body framing, server-sent events, error responses), and connections to targets.

Knows nothing of routing. Only `upstream` and `write_batch` use the event loop.
"""
