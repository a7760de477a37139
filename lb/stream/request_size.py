"""How much work a request will be, before an engine counts it. Pure.

Text counts by its bytes, which `lb.core.model_costs` turns into tokens. Images and sound do not: an image is as many tokens
as its area needs patches, a sound as many as it has frames, and where neither can be read off their first bytes, a usual size
is taken.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Mapping
from typing import Any, Final

from lb.http.api_paths import Work
from lb.stream.openai_request import ParsedRequest

PIXELS_PER_TOKEN: Final = 750  # Claude's rule; the patches of Qwen2-VL are of 784 pixels
MOST_IMAGE_TOKENS: Final = 16_384
USUAL_IMAGE_TOKENS: Final = 1_398  # one megapixel
AUDIO_TOKENS_PER_S: Final = 50.0  # Whisper's encoder: 1,500 positions for 30 s
AUDIO_BYTES_PER_S: Final = 16_000.0  # of what is compressed: 128 kbit/s
MESSAGE_BYTES: Final = 16  # role and marks of a message, in a usual chat template

_PROMPT_FIELDS: Final = frozenset((
    "messages", "prompt", "input", "inputs", "text", "input_ids", "system", "instructions", "tools", "query", "documents",
    "text_1", "text_2", "queries", "suffix", "functions",
))  # fmt: skip
_HEAD_BYTES: Final = 64 * 1024  # of an image, in which its size is looked for
_WAV: Final = re.compile(rb"RIFF.{4}WAVEfmt .{12}(.{4})", re.DOTALL)
_MEDIA_KEYS: Final = (
    "image_url",
    "source",
    "image",
    "input_audio",
    "audio_url",
    "video_url",
    "file_data",
    "data",
)
_IMAGE_TYPES: Final = ("image_url", "input_image", "image", "image_embeds")
_AUDIO_TYPES: Final = ("input_audio", "audio_url", "audio")


class RequestSize:
    """What is read: `text_bytes` and `tokens` beside them. What is written at most: `most_out` tokens over all `choices`; None: no limit."""

    __slots__ = ("choices", "most_out", "text_bytes", "tokens")

    def __init__(
        self, text_bytes: int = 0, tokens: int = 0, most_out: int | None = None, choices: int = 1
    ) -> None:
        self.text_bytes = text_bytes
        self.tokens = tokens
        self.most_out = most_out
        self.choices = choices


def size_of(work: Work, parsed: ParsedRequest, body: bytes) -> RequestSize:
    """Return the size of a request whose body is here. A body that is not parsed is all text, or all sound."""
    if work is Work.NONE:
        return RequestSize(most_out=0)
    most_out = 0 if work is Work.READS else parsed.most_tokens
    choices = parsed.choices
    if parsed.json is not None:
        text_bytes, tokens = _prompt_size(parsed.json)
        return RequestSize(text_bytes, tokens, most_out, choices)
    if work is Work.MEDIA:
        return RequestSize(0, round(_seconds_of(body, len(body)) * AUDIO_TOKENS_PER_S), None, 1)
    return RequestSize(len(body), 0, most_out, choices)


def _prompt_size(json: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bytes of text and the other tokens of a prompt."""
    text_bytes = tokens = 0
    left: list[Any] = [value for name, value in json.items() if name in _PROMPT_FIELDS]
    while left:
        one = left.pop()
        kind = type(one)
        if kind is str:
            text_bytes += _bytes_of(one)
        elif kind is list:
            if one and type(one[0]) is int:
                tokens += len(one)
            else:
                left += one
        elif kind is dict:
            if len(one) == 2:  # as nearly all messages
                role, content = one.get("role"), one.get("content")
                if type(role) is str and type(content) is str:
                    text_bytes += MESSAGE_BYTES + _bytes_of(role) + _bytes_of(content)
                    continue
            part = one.get("type")
            if part in _IMAGE_TYPES:
                tokens += _image_tokens(_media(one)[0])
            elif part in _AUDIO_TYPES:
                tokens += round(_seconds_of(*_media(one)) * AUDIO_TOKENS_PER_S)
            else:
                text_bytes += MESSAGE_BYTES
                left += one.values()
        elif one is not None:
            text_bytes += 4
    return text_bytes, tokens


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _media(part: Mapping[str, Any]) -> tuple[bytes, int]:
    """Return the first bytes of an image or a sound, and how many there are; none if they are elsewhere."""
    value: Any = part
    for _ in range(3):
        if type(value) is not dict:
            break
        value = next((value[key] for key in (*_MEDIA_KEYS, "url") if key in value), None)
    if type(value) is not str:
        return b"", 0
    start = 0
    if value.startswith("data:"):
        start = value.find(",") + 1 or len(value)
    elif "://" in value[:16]:
        return b"", 0
    try:
        head = base64.b64decode(value[start : start + _HEAD_BYTES // 3 * 4], validate=False)
    except (binascii.Error, ValueError):
        return b"", 0
    return head, max(len(head), (len(value) - start) * 3 // 4)


def _image_tokens(image: bytes) -> int:
    width, height = _pixels_of(image)
    if not width * height:
        return USUAL_IMAGE_TOKENS
    return max(1, min(MOST_IMAGE_TOKENS, width * height // PIXELS_PER_TOKEN))


def _pixels_of(image: bytes) -> tuple[int, int]:
    """Return width and height as the head of a PNG, GIF, JPEG or WebP has them; zeros if it does not."""
    try:
        if image.startswith(b"\x89PNG\r\n\x1a\n"):
            width, height = struct.unpack_from(">II", image, 16)
        elif image.startswith((b"GIF87a", b"GIF89a")):
            width, height = struct.unpack_from("<HH", image, 6)
        elif image.startswith(b"\xff\xd8"):
            return _pixels_of_jpeg(image)
        elif image[8:15] == b"WEBPVP8":
            return _pixels_of_webp(image)
        else:
            return 0, 0
    except struct.error:
        return 0, 0
    return width, height


def _pixels_of_jpeg(image: bytes) -> tuple[int, int]:
    at = 2
    while image[at] == 0xFF if at < len(image) else False:
        marker, length = struct.unpack_from(">BH", image, at + 1)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # a frame, and no table
            height, width = struct.unpack_from(">HH", image, at + 5)
            return width, height
        at += 2 + length
    return 0, 0


def _pixels_of_webp(image: bytes) -> tuple[int, int]:
    form = image[15:16]
    if form == b"X":
        return 1 + int.from_bytes(image[24:27], "little"), 1 + int.from_bytes(image[27:30], "little")
    if form == b"L":
        bits = int.from_bytes(image[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", image, 26)
    return width & 0x3FFF, height & 0x3FFF


def _seconds_of(sound: bytes, size: int) -> float:
    """Return how long a sound of this size lasts, by the rate in a WAV's head or a usual one."""
    wav = _WAV.search(sound, 0, 4096)
    rate = float(struct.unpack("<I", wav[1])[0]) if wav is not None else AUDIO_BYTES_PER_S
    return size / max(1000.0, rate)
