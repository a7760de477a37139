"""Send random bytes through the TLS relay in C of a replica's machine, and compare with what it must do. For a build with sanitizers.

    python scripts/fuzz_tls_relay.py [--cases 100000] [--connections 400] [--seed 1]

Compiles provisioners/remote/host_agent/_tls_relay.c with -fsanitize=address,undefined, and runs in a process that has the libraries of the
sanitizers preloaded; any report of theirs ends it. A case is one segment, of which the relay must see what `TrafficWatch` sees. A
connection has clients and servers that send random pieces, read or do not, and end in random ways, or speak no TLS at all: what
arrives is a beginning of what was sent, and all of it where both ended in order.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import random
import socket
import ssl
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from provisioners.remote.certificates import Authority  # noqa: E402
from provisioners.remote.host_agent.tls_proxy import TrafficWatch  # noqa: E402
from scripts.fuzz_fast_path import mutated, require, sanitized  # noqa: E402

SOURCE = "provisioners/remote/host_agent/_tls_relay.c"
MACHINE = "own-fuzz-1-0123456789"
LONGEST_S = 30.0
VERSIONS = (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2", b"HTTP/1.", b"")
AGENTS = (b"skyserve", b"skyserve-lb", b"SkyServe", b"skyserve2", b"openai", b"x" * 4090)
STATUSES = (b"200", b"101", b"100", b"302", b"404", b"503", b"2", b"")


def request(rng: random.Random) -> bytes:
    name = rng.choice((b"User-Agent", b"user-agent", b"USER-AGENT", b"X"))
    fields = [b"Host: x", b"%b: %b" % (name, rng.choice(AGENTS))]
    rng.shuffle(fields)
    line = b"POST /%b %b" % (b"y" * rng.choice((0, 3, 4080, 4090)), rng.choice(VERSIONS))
    return b"\r\n".join([line, *fields, b"", rng.randbytes(rng.randrange(20))])


def response(rng: random.Random) -> bytes:
    return b"%b %b OK\r\n\r\n" % (rng.choice(VERSIONS), rng.choice(STATUSES))


def segments(library: ctypes.CDLL, cases: int, first: int) -> None:
    for case in range(first, first + cases):
        rng = random.Random(case)
        watch = TrafficWatch(lambda: None, lambda: None, lambda: 0.0)
        data = (request if case % 2 else response)(rng)
        for _ in range(rng.randrange(3)):
            data = mutated(rng, data) if data else data
        at = f"case {case}: {data!r}"
        before = rng.random() < 0.5
        if case % 2:
            watch._is_ours = before
            watch.request(data)
            seen = library.tls_relay_request(data, len(data))
            require(watch._is_ours == (before if seen < 0 else seen == 1), at)
        else:
            watch._is_success = before
            watch.response(data)
            seen = library.tls_relay_response(data, len(data))
            require(watch._is_success == (before if seen < 0 else seen == 1), at)


class Connection:
    """One random connection: what either end sends and gets. `in_order`: the server ends, once it has all of the client's."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.in_order = self.rng.random() < 0.5
        self.sends = {who: self._pieces() for who in ("client", "server")}
        self.got = {"client": b"", "server": b""}
        self.served = asyncio.Event()

    def _pieces(self) -> list[bytes]:
        sizes = (1, 100, 5000, 70_000, 300_000)
        return [self.rng.randbytes(self.rng.choice(sizes)) for _ in range(self.rng.randrange(6))]

    async def take_part(self, who: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        awaited = b"".join(self.sends["client"]) if self.in_order and who == "server" else None
        reading = asyncio.ensure_future(self._read(who, reader, awaited))
        with suppress(OSError):
            for data in self.sends[who]:
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(0)
            if not self.in_order and self.rng.random() < 0.5:
                writer.transport.abort()
        if self.in_order:
            await reading
        writer.close()
        await reading

    async def _read(self, who: str, reader: asyncio.StreamReader, awaited: bytes | None) -> None:
        with suppress(OSError, AttributeError):  # of asyncio's, where an aborted connection is read on
            if not self.in_order and self.rng.random() < 0.2:
                return
            while self.got[who] != awaited and (data := await reader.read(65536)):
                self.got[who] += data


async def connections(port: int, server_port: int, context: ssl.SSLContext, count: int, first: int) -> None:
    now: list[Connection] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        one = now[-1]
        await one.take_part("server", reader, writer)
        one.served.set()

    server = await asyncio.start_server(serve, "127.0.0.1", server_port)
    for seed in range(first, first + count):
        one = Connection(seed)
        now.append(one)
        if seed % 10 == 0:
            await _speak_no_tls(port, one.rng)
            continue
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname=MACHINE
        )
        await asyncio.wait_for(one.take_part("client", reader, writer), LONGEST_S)
        await asyncio.wait_for(one.served.wait(), LONGEST_S)
        for sender, receiver in (("client", "server"), ("server", "client")):
            sent = b"".join(one.sends[sender])
            as_it_must = sent == one.got[receiver] if one.in_order else sent.startswith(one.got[receiver])
            require(as_it_must, f"connection {seed}: from {sender} to {receiver}")
    server.close()


async def _speak_no_tls(port: int, rng: random.Random) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with suppress(OSError):
        writer.write(rng.choice((b"\x16\x03\x01", b"")) + rng.randbytes(rng.randrange(1, 2000)))
        await writer.drain()
        if rng.random() < 0.5:
            writer.transport.abort()
        writer.write_eof()
        await asyncio.wait_for(reader.read(), LONGEST_S)
    writer.close()


def run(library_path: str, given: argparse.Namespace) -> None:
    library = ctypes.CDLL(library_path)
    segments(library, given.cases, given.seed)
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        authority, pem = Authority(bytes(32), "own"), Path(folder) / "front.pem"
        pem.write_bytes(authority.of_machine(MACHINE))
        library.tls_relay_prepare.restype = ctypes.c_char_p
        why = library.tls_relay_prepare(os.fsencode(pem))
        require(why is None, str(why))
        listener.setblocking(False)
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))
            server_port = reserved.getsockname()[1]
        _, notes = os.pipe()
        os.set_blocking(notes, False)
        arguments = (listener.fileno(), server_port, 100, 2, notes)
        threading.Thread(target=library.tls_relay_run, args=arguments, daemon=True).start()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=authority.certificate)
        asyncio.run(
            connections(listener.getsockname()[1], server_port, context, given.connections, given.seed)
        )
    print(f"{given.cases} segments and {given.connections} connections: as they must be", flush=True)
    os._exit(0)  # the relay's threads never end


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--connections", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1, help="of the first case")
    parser.add_argument("--library", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.library:
        run(given.library, given)
    again = ["--cases", str(given.cases), "--connections", str(given.connections), "--seed", str(given.seed)]
    sys.exit(sanitized(SOURCE, "_tls_relay.so", [__file__, *again]))


if __name__ == "__main__":
    main()
