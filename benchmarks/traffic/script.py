"""Engines that say what a workload expects, word for word.

The engine model asks its language for one token at a time. Here the tokens are known beforehand: the next prompt of
a conversation repeats the response of the last one, and only an engine that really said it finds it in its cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyserve_cli.engine.text import Context, Language


class Script(Language):
    """`cast` a response under a number, and the request that has this number as its seed will say it.

    An engine that preempts a request goes on with the context it had, so a response is asked for once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._answers: dict[int, tuple[int, ...]] = {}

    def cast(self, number: int, answer: tuple[int, ...]) -> None:
        self._answers[number] = answer

    def read(self, prompt: Sequence[int], seed: int = 0) -> Context:
        return _Part(self._answers.pop(seed))

    def next(self, context: Context, *, may_end: bool) -> int:
        return context.draw()


class _Part(Context):
    """A response, and how far it has been said."""

    __slots__ = ("_answer", "_said")

    def __init__(self, answer: tuple[int, ...]) -> None:
        self._answer = answer
        self._said = 0

    def extend(self, tokens: Sequence[int]) -> None:
        self._said += len(tokens)

    def draw(self) -> int:
        return self._answer[self._said]
