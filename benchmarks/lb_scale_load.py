"""The engines and the clients of `benchmarks.lb_scale`: one process, one port, any number of targets by path.

Prints the port of the engine. Then, for each line of JSON on its standard input, it runs clients against a load
balancer, and when they are done prints how many connections the load balancer has opened for their requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from random import Random

PAGE = (
    b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"
    b"vllm:kv_cache_usage_perc 0.1\n"
)
REPLY = (
    b'{"id":"r","object":"chat.completion","choices":[],"usage":{"prompt_tokens":500,"completion_tokens":9}}'
)
SHARED = "The instructions of the system, which all conversations share. " * 8


def response(status: bytes, body: bytes, kind: bytes = b"application/json", *, close: bool = False) -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n%b" % (
        status,
        kind,
        len(body),
        b"Connection: close\r\n" if close else b"",
        body,
    )


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """The head of a message; its body is read and dropped."""
    head = await reader.readuntil(b"\r\n\r\n")
    lower = head.lower()
    if b"\r\ncontent-length:" in lower:
        await reader.readexactly(int(lower.split(b"\r\ncontent-length:")[1].split(b"\r\n")[0]))
    return head


class Engine:
    """A response takes `takes_s`, half of it more or less, so that those that began together do not end together. With
    `close` each is the last one on its connection."""

    def __init__(self, takes_s: float, close: bool) -> None:
        self._takes_s = takes_s
        self._close = close
        self._rng = Random(0)
        self.opened = 0  # connections that brought a request; probes have their own

    async def listen(self) -> int:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=4096)
        return int(server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = True
        try:
            while True:
                head = await read_message(reader)
                path = head.split(b" ", 2)[1]
                if head.startswith(b"POST"):
                    self.opened += first
                    first = False
                    await asyncio.sleep(self._takes_s * self._rng.uniform(0.5, 1.5))
                    writer.write(response(b"200 OK", REPLY, close=self._close))
                    if self._close:
                        writer.close()
                        return
                elif path.endswith(b"/metrics"):
                    writer.write(response(b"200 OK", PAGE, b"text/plain"))
                elif path.endswith(b"/version"):
                    writer.write(response(b"200 OK", b'{"version":"0.11.0"}'))
                else:
                    writer.write(response(b"404 Not Found", b"{}"))
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.close()


async def client(port: int, requests: int, number: int) -> None:
    await asyncio.sleep(0.001 * number)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for turn in range(requests):
        prompt = SHARED + f"conversation {(number + turn) % 500:04} " * 100
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}]}).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"X-Session-Id: user-%d\r\nContent-Length: %d\r\n\r\n%b" % (turn % 500, len(body), body)
        )
        await read_message(reader)
    writer.close()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--takes", type=float, default=0.0, help="seconds of one response")
    parser.add_argument("--close", action="store_true", help="close the connection after each response")
    args = parser.parse_args()
    engine = Engine(args.takes, args.close)
    print(await engine.listen(), flush=True)
    loop = asyncio.get_running_loop()
    while text := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(text)
        before = engine.opened
        ports = order.get("ports") or [order["port"]]  # clients take turns
        await asyncio.gather(
            *(
                client(ports[n % len(ports)], order["requests"], order["seed"] + n)
                for n in range(order["clients"])
            ),
            return_exceptions=True,
        )
        print(engine.opened - before, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
