"""The states of a proxied request: one table from (state, event) to state.

`python -m lb.proxy.states` prints it. A pair that is not in the table is a defect: `move` raises, and the fault barrier
(`lb.proxy.faults`) ends that one request.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final


class State(Enum):
    """The states of a request, in the order of one without trouble."""

    __hash__ = (
        object.__hash__
    )  # Enum's own is written in Python, and this one is requested at each step of each request

    CHOOSING = "choosing"  # a target is being chosen; never seen from outside
    QUEUED = "queued"  # no target has room
    BACKING_OFF = "backing_off"  # waits before another attempt
    ATTEMPTING = "attempting"  # an attempt is under way, without the first byte of its response
    STREAMING = "streaming"  # the response is passed on as it comes
    TUNNEL = "tunnel"  # a WebSocket
    DONE = "done"


class RequestEvent(Enum):
    """What happens to a request."""

    __hash__ = object.__hash__

    CHOSEN = "chosen"  # a target
    ENQUEUED = "enqueued"
    FAILED = "failed"  # its attempt, before the first byte
    BACKED_OFF = "backed_off"  # another attempt is allowed, later
    RETRIED = "retried"  # the wait is over
    FIRST_BYTE = "first_byte"  # of a response that is passed on as it comes
    UPGRADED = "upgraded"
    BROKEN = "broken"  # its response broke off, or is taken away from its target
    ENDED = "ended"  # the client has all it will get


TABLE: Final[Mapping[State, Mapping[RequestEvent, State]]] = {
    State.CHOOSING: {
        RequestEvent.CHOSEN: State.ATTEMPTING,
        RequestEvent.ENQUEUED: State.QUEUED,
        RequestEvent.BACKED_OFF: State.BACKING_OFF,
        RequestEvent.ENDED: State.DONE,
    },
    State.QUEUED: {
        RequestEvent.CHOSEN: State.ATTEMPTING,
        RequestEvent.ENDED: State.DONE,
    },
    State.BACKING_OFF: {
        RequestEvent.RETRIED: State.CHOOSING,
        RequestEvent.ENDED: State.DONE,
    },
    State.ATTEMPTING: {
        RequestEvent.FAILED: State.CHOOSING,
        RequestEvent.FIRST_BYTE: State.STREAMING,
        RequestEvent.UPGRADED: State.TUNNEL,
        RequestEvent.ENDED: State.DONE,
    },
    State.STREAMING: {
        RequestEvent.BROKEN: State.CHOOSING,
        RequestEvent.ENDED: State.DONE,
    },
    State.TUNNEL: {
        RequestEvent.ENDED: State.DONE,
    },
    State.DONE: {},
}


class TransitionError(Exception):
    """An event that the state of a request does not allow."""


def move(state: State, event: RequestEvent) -> State:
    """Return the next state. Raises TransitionError."""
    after = TABLE[state].get(event)
    if after is None:
        raise TransitionError(f"a request that is {state.value} cannot be {event.value}")
    return after


def main() -> None:
    for state, row in TABLE.items():
        for event, after in row.items():
            print(f"{state.value:12} {event.value:12} {after.value}")


if __name__ == "__main__":
    main()
