"""How many tokens a response will have, guessed before it begins.

A port with two small forecasters. PreServe (section 4.2) uses a fine-tuned DistilBERT, which reads the prompt
and costs 36 ms a request; that may stand behind the same port. Ours knows only whose requests they are:

- `RunningMedian`: the median of the last lengths of the same scope (model and tenant), else of the last of
  all. Lengths are long-tailed (PreServe, figure 2c), and a mean would follow the tail.
- `Constant`: a number, for comparisons and tests.

A client's own limit (`max_tokens`) caps every guess. It is no guess itself: most clients set it high and few
responses reach it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from typing import Protocol

from policies.routing.base import RequestView

DEFAULT_TOKENS = 200  # ours: between the short responses of question sets and the long ones of chats
WINDOW = 101
ENOUGH = 5
MAX_SCOPES = 1000


class ResponseLength(Protocol):
    """Guesses the length of responses in tokens, and learns from those that are whole."""

    def predict(self, request: RequestView) -> int:
        """Expected tokens, at least 1. Changes nothing."""
        ...

    def learn(self, request: RequestView, tokens: int) -> None:
        """The response is complete and was `tokens` long."""
        ...


class Constant:
    """The same guess for every request."""

    def __init__(self, tokens: int = DEFAULT_TOKENS) -> None:
        self._tokens = tokens

    def predict(self, request: RequestView) -> int:
        return capped(self._tokens, request)

    def learn(self, request: RequestView, tokens: int) -> None:
        pass


class RunningMedian:
    """Of the last `window` responses of a scope; of all scopes until it has `ENOUGH`, `default` until they have.

    The `max_scopes` most recent scopes are remembered.
    """

    def __init__(
        self, default: int = DEFAULT_TOKENS, window: int = WINDOW, max_scopes: int = MAX_SCOPES
    ) -> None:
        self._default = default
        self._window = window
        self._max_scopes = max_scopes
        self._all = Window(window)
        self._scopes: OrderedDict[str, Window] = OrderedDict()

    def predict(self, request: RequestView) -> int:
        lengths = self._scopes.get(request.scope)
        if lengths is None or len(lengths) < ENOUGH:
            lengths = self._all
        return capped(lengths.median() if len(lengths) >= ENOUGH else self._default, request)

    def learn(self, request: RequestView, tokens: int) -> None:
        self._all.add(tokens)
        lengths = self._scopes.get(request.scope)
        if lengths is None:
            lengths = self._scopes[request.scope] = Window(self._window)
            if len(self._scopes) > self._max_scopes:
                self._scopes.popitem(last=False)
        else:
            self._scopes.move_to_end(request.scope)
        lengths.add(tokens)


def capped(tokens: int, request: RequestView) -> int:
    """Return the guess within what the client has allowed."""
    return max(1, min(tokens, request.max_tokens) if request.max_tokens else tokens)


class Window:
    """The last numbers, in order of arrival and in order of size."""

    __slots__ = ("_arrived", "_size", "_sorted")

    def __init__(self, size: int) -> None:
        self._size = size
        self._arrived: deque[int] = deque()
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, number: int) -> None:
        if len(self._arrived) == self._size:
            del self._sorted[bisect_left(self._sorted, self._arrived.popleft())]
        self._arrived.append(number)
        insort(self._sorted, number)

    def median(self) -> int:
        """Return the upper one of the middle two, if there are two."""
        return self._sorted[len(self._sorted) // 2]
