"""Tokens without a vocabulary file, and a language model that is one hash.

**Tokens.** Text is cut into pieces of one to four ASCII letters or digits with the space before them, into the
three special markers, and everything else into UTF-8 bytes. English comes to about four characters per token,
like the tokenizers of real models. An id is the piece written as a number, so no table is needed and
`decode(encode(text)) == text` for every text:

    0-255       one byte
    256-258     <|endoftext|> <|im_start|> <|im_end|>
    259-...     pieces: base 62, shorter ones first, without and with the leading space in turn

**Words.** `Language` plays the model: the next token is a function of *all* tokens before it (a hash) and of
the seed, as a real model's greedy choice is. It follows that a stream which broke after k tokens is continued
exactly by a client that sends prompt + those k tokens, as ids or as text, to any engine with the same seed: the
context is the same, so the rest is the same. Nothing about the first request needs to be remembered.
As text it holds too because output words are single tokens that begin with a space (or are one punctuation
byte): no piece can merge with what precedes it, so text and ids never disagree about the seam.

Where a response ends is drawn in the same way, with a constant chance per token. Lengths are therefore
geometric, not the log-normal-like shape of real traffic: drive an experiment with `max_tokens` and `ignore_eos`
where the distribution matters.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b

ENDOFTEXT, IM_START, IM_END = 256, 257, 258
SPECIAL = {"<|endoftext|>": ENDOFTEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
EOS = IM_END

_FIRST_PIECE = 259
_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_DIGIT = {letter: value for value, letter in enumerate(_ALPHABET)}
_LONGEST_PIECE = 4
# How many pieces (without the space) are shorter than n characters: where the codes of length n start.
_CODES_BEFORE = [sum(62**shorter for shorter in range(1, n)) for n in range(1, _LONGEST_PIECE + 2)]
VOCABULARY = _FIRST_PIECE + 2 * _CODES_BEFORE[_LONGEST_PIECE]

_PIECES = re.compile(r"<\|(?:endoftext|im_start|im_end)\|>| ?[A-Za-z0-9]{1,4}|[^A-Za-z0-9]")
_SPECIAL_TEXT = {token: text for text, token in SPECIAL.items()}


def encode(text: str) -> list[int]:
    """Return the token ids of `text`. Raises UnicodeEncodeError for lone surrogates, which are not text."""
    ids: list[int] = []
    for piece in _PIECES.findall(text):
        ids.extend(_ids_of(piece))
    return ids


def decode(tokens: Iterable[int], *, skip_special: bool = False) -> str:
    """Return the text of `tokens`; bytes that are not UTF-8 become replacement characters.

    Raises ValueError for an id outside the vocabulary.
    """
    return b"".join(
        b"" if skip_special and token in _SPECIAL_TEXT else token_bytes(token) for token in tokens
    ).decode("utf-8", errors="replace")


@lru_cache(maxsize=65_536)
def token_bytes(token: int) -> bytes:
    """Return what one token stands for. Raises ValueError for an id outside the vocabulary."""
    if not 0 <= token < VOCABULARY:
        raise ValueError(f"token id {token} is not in the vocabulary (0 to {VOCABULARY - 1})")
    if token < 256:
        return bytes([token])
    if token in _SPECIAL_TEXT:
        return _SPECIAL_TEXT[token].encode()
    code, spaced = divmod(token - _FIRST_PIECE, 2)
    length = next(n for n in range(1, _LONGEST_PIECE + 1) if code < _CODES_BEFORE[n])
    code -= _CODES_BEFORE[length - 1]
    letters = ""
    for _ in range(length):
        code, digit = divmod(code, 62)
        letters = _ALPHABET[digit] + letters
    return ((" " if spaced else "") + letters).encode()


@lru_cache(maxsize=65_536)
def _ids_of(piece: str) -> tuple[int, ...]:
    if piece in SPECIAL:
        return (SPECIAL[piece],)
    letters = piece.lstrip(" ") if len(piece) > 1 else piece
    if letters[0] not in _DIGIT:
        return tuple(piece.encode("utf-8"))
    code = 0
    for letter in letters:
        code = code * 62 + _DIGIT[letter]
    code += _CODES_BEFORE[len(letters) - 1]
    return (_FIRST_PIECE + 2 * code + (letters != piece),)


_WORDS = """
    a able also an and any area are as ask at away back ball bank base bear beat bed been best big bird
    blue boat body bone book both box boy busy but by call calm came can car card care case city clay clue coal
    coat cold come cook cool copy core corn cost cow crew cup cut dark data date dawn day deal deep deer desk did
    dog done door down draw drum dry dust each ear earn east easy eat edge egg else end even ever eye face
    fact fair fall far farm fast fate feel feet few field file fill film find fine fire fish five flag flat flow
    fly fog folk food foot for form four free from fuel full game gate gave gift girl give glad go goal gold good
    gray grew grow half hall hand hard has hat have he head hear heat help her here high hill him his hold home
    hope horn host hour how hunt ice idea if in inch iron is it item jar join jump just keen keep key kind king
    knew know lake lamp land last late law lay lead leaf left leg less let lid life lift like lime line lion list
    live long look loop lot loud love low luck made mail main make many map mark may meal mean meet milk mill mind
    mine miss mist moon more most move much must nail name near neat need nest new next nice nine no none noon
    nor nose not note now of off oil old on once one only open or our out over own pack page pair palm park
    part pass past path pay peak pen pick pine plan play plum poem pond pool port post pour pure put race rail
    rain ran rare read real red rest rice rich ride ring rise road rock roof room root rope row rule run safe said
    sail salt same sand save saw say sea seat see seed seem self send set ship shoe shop show side sign silk sing
    site six size skin sky slow small snow so soft soil some song soon sort soup star stay stem step stop such
    sun sure swim tail take tale talk tall task tea team tell ten tent than that the them then they thin this
    tide time tin to told too took tool top town tree trip true try tune turn two type unit up upon us use vast
    very view walk wall want warm was wave way we wear well went were west what when who why wide wild will wind
    wine wing wise wish with wood word work year yes yet you zero zone"""
# One token per word is what makes the seam exact (see above): longer words would be two pieces.
_WORD_TOKENS = tuple(encode(" " + word)[0] for word in _WORDS.split())
_PUNCTUATION = tuple(b".,")


class Language:
    """A next-token function over whole contexts. Engines with equal seeds are replicas of one model."""

    def __init__(self, seed: int = 0, mean_output_tokens: float = 200.0) -> None:
        """`mean_output_tokens`: of a response without a limit, its end token included; at least 1."""
        if mean_output_tokens < 1:
            raise ValueError(f"mean_output_tokens must be at least 1 (got {mean_output_tokens})")
        self._seed = seed
        self._end_below = int(2**32 / mean_output_tokens)

    def read(self, prompt: Sequence[int], seed: int = 0) -> Context:
        """Return the context after `prompt`. `seed` is the request's own: another seed, another response."""
        context = Context(self._seed, seed)
        context.extend(prompt)
        return context

    def next(self, context: Context, *, may_end: bool) -> int:
        """Return the token that follows, without appending it; `EOS` only if `may_end`."""
        draw = context.draw()
        if may_end and (draw >> 32) < self._end_below:
            return EOS
        kind, choice = draw & 0xF, (draw & 0xFFFF_FFFF) >> 4
        if kind == 0:
            return _PUNCTUATION[choice % len(_PUNCTUATION)]
        return _WORD_TOKENS[choice % len(_WORD_TOKENS)]


class Context:
    """All tokens so far, as a running hash: how they came in makes no difference."""

    __slots__ = ("_hash",)

    def __init__(self, model_seed: int, request_seed: int) -> None:
        self._hash = blake2b(f"{model_seed}/{request_seed}:".encode(), digest_size=8)

    def extend(self, tokens: Sequence[int]) -> None:
        self._hash.update(struct.pack(f"<{len(tokens)}I", *tokens))

    def draw(self) -> int:
        """64 uniform bits that depend on every token so far."""
        return int.from_bytes(self._hash.digest(), "little")
