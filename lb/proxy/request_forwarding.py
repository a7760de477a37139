"""A request that may be served in another region. See `lb.core.forwarding`.

It is compared with the peers when it is placed, and while it is queued with each of their beats. A peer that has no room
answers `full` before the first byte; the request then has its old place in the queue. A stream that a peer has started and
loses is resumed here.
"""

from __future__ import annotations

from lb.core.forwarding import explained
from lb.core.hop import FULL, RequestHop, hop_lines
from lb.core.targets import Booking
from lb.http.messages import ResponseHead
from lb.proxy.request_responding import RespondingRequest
from lb.proxy.states import RequestEvent, State, move


class ForwardingRequest(RespondingRequest):
    """A request, and its way to a peer."""

    __slots__ = ()

    def leaves(self, now: float) -> bool:
        """Forward the request if it is better off in another region. Returns whether it is on its way there."""
        forwarding, tries = self.proxy.forwarding, self.tries
        if forwarding is None or self.arrival.hop is not None or self.relay is not None:
            return False
        if not tries.may_move() or self.client.body_left or self.head.websocket:
            return False
        left_s = min(tries.wait_left_s, max(1.0, tries.queue_left_s))
        found = forwarding.elsewhere(self.view, len(self.proxy.queue), left_s, now, self.tried, self.policy)
        if found is None:
            return False
        choice = explained(found)
        if not found.region:
            if self.state is not State.QUEUED:
                self.arrival.explanation.note(now, "stays", "", found.because, choice)
            return False
        self.arrival.explanation.note(now, "forwards", found.region, found.because, choice)
        if self.ticket is not None:
            self.proxy.queue.leave(self.ticket)
            self._left_queue(now)
        hop = RequestHop(now - self.arrival.at, left_s, self.weight, self.tenant)
        self.hop_lines = hop_lines(hop, dict(self.head.ours or {}))
        self.begin_attempt(forwarding.book(self.view, found.region, now), now, fresh=False)
        return True

    def begin_attempt(self, booking: Booking, now: float, fresh: bool) -> None:
        """Send the request to the target of the booking."""
        raise NotImplementedError

    def is_full(self, response: ResponseHead, body: bytes) -> bool:
        """Return whether the response says that a peer has no room for the request."""
        booking = self.booking
        forwarding = self.proxy.forwarding
        is_peer = forwarding is not None and booking is not None and forwarding.owns(booking)
        return is_peer and response.status == 429 and FULL in body

    def came_back(self) -> None:
        """A peer had no room: wait here, at the old place."""
        proxy, booking = self.proxy, self.booking
        assert booking is not None  # noqa: S101 (for the type checker)
        now = proxy.clock()
        if proxy.forwarding is not None:
            proxy.forwarding.returned(self.view, booking.key.id)
        self.arrival.explanation.note(now, "came_back", booking.key.id, "the peer has no room")
        self.tries.by_epoch.pop(booking.epoch, None)
        self.tries.was_queued = True
        self.tries.wait_left_s -= now - booking.since
        self.state = move(self.state, RequestEvent.FAILED)
        self._drop_attempt(now)
        self.place_here(now)

    def place_here(self, now: float) -> None:
        """Go to a target of this region, or wait for one."""
        raise NotImplementedError
