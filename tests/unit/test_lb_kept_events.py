"""What a stream has sent comes back as it came, packed or not, and packed it takes a fraction."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.stream.kept_events import KeptEvents, PlainEvents
from tests.kit.forwardings import EVENT, chunk

ROOT = Path(__file__).resolve().parents[2]
packed_only = pytest.mark.skipif(
    find_spec("lb.proxy._fast_path") is None, reason="the helper is not built: no C compiler at installation"
)
TYPES: list[Any] = [pytest.param(PlainEvents, id="plain")]
try:
    from lb.proxy._fast_path import PackedEvents
except ImportError:
    pass
else:
    TYPES.append(pytest.param(PackedEvents, id="packed"))

MEGABYTE = 1 << 20


def token(text: str, *ids: int) -> bytes:
    """A chunk as vLLM writes it; `text` is already escaped."""
    return chunk(
        b'data: {"id":"chatcmpl-8f0b1c2d3e4f5a6b7c8d9e0f1a2b3c4d","object":"chat.completion.chunk","created":1700000000,'
        b'"model":"meta-llama/Llama-3.1-8B-Instruct","choices":[{"index":0,"delta":{"content":"%b"},"logprobs":null,'
        b'"finish_reason":null,"token_ids":[%b]}]}\n\n'
        % (text.encode(), b",".join(b"%d" % one for one in ids))
    )


TYPED = chunk(b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"a"}}\n\n')
READS = [
    pytest.param([], id="nothing"),
    pytest.param([b""], id="an empty read"),
    pytest.param([b"x"], id="one byte"),
    pytest.param([b"x", b"x", b"y", b"", b"x"], id="bytes one by one"),
    pytest.param([EVENT], id="an event"),
    pytest.param([EVENT] * 5000, id="the same event"),
    pytest.param([EVENT * 3, EVENT, EVENT * 2], id="several in a read"),
    pytest.param([token(" a", 1), token(" abc", 12345), token("", 9)], id="text and ids of other lengths"),
    pytest.param(
        [token("1", 1), token("12", 1), token("1]", 1), token(",", 2)], id="text that looks like ids"
    ),
    pytest.param([token('\\"', 1), token("a", 1), token("\\\\", 1), token('\\n\\"', 1)], id="escapes"),
    pytest.param(
        [token("a", 1, 2, 3), token("b", 4), token("c", *range(100))], id="events of several tokens"
    ),
    pytest.param([token("a", 1), TYPED, token("b", 2), TYPED], id="kinds in turn"),
    pytest.param([token("a", 1), chunk(b": still here\n\n"), token("b", 2)], id="a comment in between"),
    pytest.param([token("a", 1)[:100], token("a", 1)[100:], token("b", 2)], id="an event cut in two"),
    pytest.param([token("é\u00e9漢字", 1), token("漢é", 1)], id="not ascii"),
    pytest.param([bytes(range(256)), bytes(range(255, -1, -1)), b"\0" * 1000], id="any bytes"),
    pytest.param(
        [token("a" * MEGABYTE, 1), token("b" * MEGABYTE, 1), token("c", 1)], id="events of a megabyte"
    ),
    pytest.param([token(str(number), number) for number in range(3000)], id="more than a block"),
    pytest.param([os.urandom(5000) for _ in range(50)], id="what cannot be packed"),
]


def everything(kept: KeptEvents) -> bytes:
    parts = []
    while part := kept.pop():
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("make", TYPES)
@pytest.mark.parametrize("reads", READS)
def test_what_was_kept_comes_back(make: Callable[[], KeptEvents], reads: list[bytes]) -> None:
    kept, raw = make(), b"".join(reads)
    for read in reads:
        kept.add(read)
    assert kept.raw_bytes == len(raw)
    for size in (0, 1, 100, 2048, 200_000, len(raw), len(raw) + 1):
        assert kept.tail(size) == raw[max(0, len(raw) - size) :]
    assert everything(kept) == raw
    assert (kept.raw_bytes, kept.tail(10), kept.pop()) == (0, b"", b"")


@pytest.mark.parametrize("make", TYPES)
@given(data=st.data())
def test_parts_can_be_joined_and_taken_in_any_order(
    make: Callable[[], KeptEvents], data: st.DataObject
) -> None:
    pieces = st.sampled_from(
        [EVENT, TYPED, token(" a", 17), token('\\"', 4), token("1,", 123), b"\r\n", b'"', b""]
    )
    reads = st.one_of(pieces, st.binary(max_size=40), st.lists(pieces, max_size=4).map(b"".join))
    kept, passing, raw = make(), make(), b""
    for act in data.draw(st.lists(st.sampled_from(["add", "pass", "join", "pop", "tail"]), max_size=40)):
        if act in ("join", "add"):
            raw += passing.tail(1 << 20)
            kept.join(passing)
            assert passing.raw_bytes == 0
        if act == "add":
            read = data.draw(reads)
            kept.add(read)
            raw += read
        elif act == "pass":
            passing.add(data.draw(reads))
        elif act == "pop":
            part = kept.pop()
            assert bool(part) == bool(raw)
            assert raw.startswith(part)
            raw = raw[len(part) :]
        elif act == "tail":
            assert kept.tail(100) == raw[-100:]
        assert kept.raw_bytes == len(raw)
    assert everything(kept) == raw


@pytest.mark.parametrize("make", TYPES)
def test_what_is_dropped_takes_no_memory(make: Callable[[], KeptEvents]) -> None:
    kept = make()
    for number in range(1000):
        kept.add(token("a", number))
    kept.clear()
    assert (kept.raw_bytes, kept.held_bytes, kept.pop()) == (0, 0, b"")
    kept.add(EVENT)
    assert everything(kept) == EVENT


def story(count: int, rng: random.Random) -> list[bytes]:
    """Chunks whose text has more entropy than any language."""
    words = ["".join(rng.choices("abcdefghij ,]1", k=rng.randint(1, 9))) for _ in range(count)]
    return [token(text, rng.randrange(10_000, 100_000)) for text in words]


@packed_only
@pytest.mark.parametrize("together", [1, 2, 8], ids=["chunk by chunk", "two a read", "eight a read"])
def test_a_token_takes_twenty_bytes(together: int) -> None:
    chunks = story(2000, random.Random(1))
    packed = PackedEvents()
    for at in range(0, len(chunks), together):
        packed.add(b"".join(chunks[at : at + together]))
    assert packed.raw_bytes > 260 * 2000
    assert packed.held_bytes < 20 * 2000


@packed_only
def test_what_is_taken_at_once_is_bounded() -> None:
    """Also where it packs so well that a block would hold any length."""
    packed = PackedEvents()
    for _ in range(20_000):
        packed.add(EVENT)
    sizes = []
    while part := packed.pop():
        sizes.append(len(part))
    assert max(sizes) <= 128 * 1024 + len(EVENT)


@packed_only
def test_what_was_joined_goes_on_as_it_was() -> None:
    """The beginning of a stream is Python's, and so is what follows a forwarding: each is compared with what was before."""
    first, second = PackedEvents(), PackedEvents()
    second.add(token("a", 1))
    first.add(token("b", 2))
    first.join(second)
    first.add(token("c", 3))
    before = first.held_bytes
    first.add(token("d", 4))
    assert first.held_bytes == before, "there was room for a few bytes"
    with pytest.raises(TypeError):
        first.join(first)
    with pytest.raises(TypeError):
        first.join(PlainEvents())  # type: ignore[arg-type]
    assert everything(first) == token("b", 2) + token("a", 1) + token("c", 3) + token("d", 4)


@packed_only
def test_the_first_bytes_are_shared_with_their_owner_until_more_come() -> None:
    first = token("a", 1)
    packed = PackedEvents()
    packed.add(first)
    assert packed.raw_bytes == len(first)
    assert packed.pop() is first
    assert packed.held_bytes == 0


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_random_streams_through_the_packing_with_sanitizers(tmp_path: Path) -> None:
    program = tmp_path / "fuzz"
    sources = ["-I", str(ROOT / "lb" / "proxy"), str(ROOT / "tests" / "fuzz" / "event_delta.c")]
    flags = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    built = subprocess.run(["cc", *flags, *sources, "-o", str(program)], capture_output=True, check=False)
    if built.returncode:
        pytest.skip("the C compiler has no sanitizers")
    done = subprocess.run([str(program), "2000"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2000 cases\n", "")
