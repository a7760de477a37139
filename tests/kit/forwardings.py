"""What the tests of the helper in C send through it."""

LIMIT = 1 << 20  # of kept bytes


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


EVENT = chunk(b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n')
