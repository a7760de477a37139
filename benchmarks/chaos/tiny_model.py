"""A tiny model of random weights in llama.cpp's file format (GGUF 3), made on the spot: a real engine without a download.

    python -m benchmarks.chaos.tiny_model tiny.gguf [--seed 7]

A Llama of two layers and some 150,000 parameters. Its vocabulary is bytes, with a token for the space: a text has one
reading into tokens, so that a response continued from its text is continued from its tokens. The output layer gives
weight to printable ASCII only, so that what it says is text, and never to the end of a text, so that responses end at
their limit. Written here byte by byte: the format is a header, pairs of keys and values, and tensors.
"""

from __future__ import annotations

import argparse
import random
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

WIDTH, LAYERS, HEADS, HIDDEN, CONTEXT = 64, 2, 4, 128, 4096
_ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
_SPACE = "\u2581"  # as SentencePiece writes it
_TEMPLATE = (  # trims as that of Llama 3 if the first message says so
    "{% set trim = '[trim]' in messages[0]['content'] %}"
    "{% for message in messages %}<{{ message['role'] }}>"
    "{{ message['content'] | trim if trim else message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

Value = bool | int | float | str | Sequence[str] | Sequence[int] | Sequence[float]


def write_tiny_model(path: Path, seed: int = 7) -> None:
    """Write the model; equal seeds give equal files."""
    tokens, kinds = _vocabulary()
    pairs: list[tuple[str, Value]] = [
        ("general.architecture", "llama"),
        ("general.name", "tiny"),
        ("llama.context_length", CONTEXT),
        ("llama.embedding_length", WIDTH),
        ("llama.block_count", LAYERS),
        ("llama.feed_forward_length", HIDDEN),
        ("llama.attention.head_count", HEADS),
        ("llama.attention.head_count_kv", HEADS),
        ("llama.attention.layer_norm_rms_epsilon", 1e-5),
        ("llama.rope.dimension_count", WIDTH // HEADS),
        ("llama.vocab_size", len(tokens)),
        ("tokenizer.ggml.model", "llama"),
        ("tokenizer.ggml.tokens", tokens),
        ("tokenizer.ggml.scores", [0.0] * len(tokens)),
        ("tokenizer.ggml.token_type", kinds),
        ("tokenizer.ggml.unknown_token_id", 0),
        ("tokenizer.ggml.bos_token_id", 1),
        ("tokenizer.ggml.eos_token_id", 2),
        ("tokenizer.ggml.add_bos_token", True),
        ("tokenizer.ggml.add_space_prefix", False),
        ("tokenizer.chat_template", _TEMPLATE),
    ]
    tensors = list(_tensors(tokens, random.Random(seed)))
    head = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(pairs)))
    for key, value in pairs:
        head += _text(key) + _value(value)
    offset = 0
    for name, shape, data in tensors:
        head += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)
        offset += _padded(len(data) * data.itemsize)
    with path.open("wb") as file:
        file.write(head.ljust(_padded(len(head)), b"\0"))
        for _, _, data in tensors:
            content = data.tobytes()
            file.write(content.ljust(_padded(len(content)), b"\0"))


def _vocabulary() -> tuple[list[str], list[int]]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), _SPACE]
    return tokens, [_UNKNOWN, _CONTROL, _CONTROL, *([_BYTE] * 256), _NORMAL]


def _tensors(
    tokens: Sequence[str], rng: random.Random
) -> Iterator[tuple[str, tuple[int, ...], array[float]]]:
    """Name, shape (the fastest dimension first) and data of each."""

    def noise(size: int, scale: float) -> array[float]:
        return array("f", (rng.gauss(0.0, scale) for _ in range(size)))

    spoken = {3 + byte for byte in range(0x21, 0x7F)} | {len(tokens) - 1}
    output = array("f")
    for token in range(len(tokens)):
        output.extend(noise(WIDTH, 1.0) if token in spoken else array("f", [0.0] * WIDTH))
    yield "token_embd.weight", (WIDTH, len(tokens)), noise(WIDTH * len(tokens), 1.0)
    yield "output_norm.weight", (WIDTH,), array("f", [1.0] * WIDTH)
    yield "output.weight", (WIDTH, len(tokens)), output
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        yield f"{at}attn_norm.weight", (WIDTH,), array("f", [1.0] * WIDTH)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield f"{at}{name}.weight", (WIDTH, WIDTH), noise(WIDTH * WIDTH, 0.25)
        yield f"{at}ffn_norm.weight", (WIDTH,), array("f", [1.0] * WIDTH)
        for name in ("ffn_gate", "ffn_up"):
            yield f"{at}{name}.weight", (WIDTH, HIDDEN), noise(WIDTH * HIDDEN, 0.25)
        yield f"{at}ffn_down.weight", (HIDDEN, WIDTH), noise(WIDTH * HIDDEN, 0.25)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    first = value[0]
    if isinstance(first, str):
        texts = b"".join(_text(str(one)) for one in value)
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + texts
    kind, letter = (_FLOAT32, "f") if isinstance(first, float) else (_INT32, "i")
    return struct.pack(f"<IIQ{len(value)}{letter}", _ARRAY, kind, len(value), *value)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random model for llama.cpp.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    write_tiny_model(given.path, given.seed)


if __name__ == "__main__":
    main()
