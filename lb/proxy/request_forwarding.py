"""A request that may be served in another region. See `lb.core.forwarding`.

It is compared with the peers when it is placed, and while it is queued with each of their beats. A peer that has no room
responds with `full` before the first byte; the request then has its old place in the queue. A stream that a peer has started and
loses is resumed here, or at another peer whose engines can continue it.
"""

from __future__ import annotations

from lb.core.forwarding import explained
from lb.core.hop import FULL, RequestHop, hop_lines
from lb.core.targets import Booking
from lb.engines.kinds import kind_named
from lb.http.messages import ResponseHead
from lb.proxy.request_responding import RespondingRequest
from lb.proxy.states import RequestEvent, State, move


class ForwardingRequest(RespondingRequest):
    """A request, and its way to a peer."""

    __slots__ = ()

    def leaves(self, now: float) -> bool:
        """Forward the request if it is better off in another region. Returns whether it is on its way there."""
        forwarding, tries = self.proxy.forwarding, self.tries
        if forwarding is None or self.arrival.hop is not None:
            return False
        if not tries.may_move() or self.client.body_left or self.head.websocket:
            return False
        left_s = min(tries.wait_left_s, max(1.0, tries.queue_left_s))
        found = forwarding.elsewhere(
            self.view,
            len(self.proxy.queue),
            left_s,
            now,
            self.tried,
            self.policy,
            self.arrival.zones,
            None if self.relay is None else self._engines(now),
        )
        if found is None:
            return False
        choice = explained(found)
        if not found.region:
            if self.state is not State.QUEUED:
                self.arrival.explanation.note(now, "stays", "", found.because, choice)
            return False
        self.arrival.explanation.note(now, "forwards", found.region, found.because, choice)
        counts = self.proxy.metrics.peers.of(found.region)
        counts.forwards[self._reason()] += 1
        counts.sent_bytes += self.view.body_bytes
        if self.ticket is not None:
            self.proxy.queue.leave(self.ticket)
            self._left_queue(now)
        hop = RequestHop(
            now - self.arrival.at,
            left_s,
            self.weight,
            self.tenant,
            self.arrival.zones,
            None if self.resume_state is None else self.resume_state.breaks_left,
        )
        self.hop_lines = hop_lines(hop, dict(self.head.ours or {}))
        self.begin_attempt(forwarding.book(self.view, found.region, now), now, fresh=False)
        return True

    def _reason(self) -> str:
        if self.relay is not None:
            return "continuation"
        return "arrival" if self.ticket is None else "queue"

    def _engines(self, now: float) -> set[str]:
        """Return the kinds of peers' engines that could continue the stream."""
        forwarding, resume_state = self.proxy.forwarding, self.resume_state
        if forwarding is None or resume_state is None or resume_state.progress is None:
            return set()
        progress = resume_state.progress
        known = forwarding.engines(now, self.arrival.zones, self.tried)
        return {name for name in known if resume_state.can_go_on(progress, kind_named(name))}

    def begin_attempt(self, booking: Booking, now: float, fresh: bool) -> None:
        """Send the request to the target of the booking."""
        raise NotImplementedError

    def response_head(self, response: ResponseHead, framing: bytes) -> bytes:
        if self.arrival.hop is not None:
            framing += self._credit(self.arrival.hop.peer)
        return super().response_head(response, framing)

    def _credit(self, peer_id: str) -> bytes:
        """Return the header line that reports room to a peer in the place of its request, or nothing."""
        proxy, attempt = self.proxy, self.attempt
        if attempt is None or proxy.forwarding is None or proxy.queue or proxy.closing or proxy.draining:
            return b""
        over = self.state is not State.STREAMING  # a response that is sent whole
        return proxy.forwarding.credit(peer_id, attempt.booking, proxy.clock(), over)

    def peer_responded(self, booking: Booking) -> None:
        """The first byte of a peer's response has come, which may say that there is room for another request."""
        forwarding, attempt = self.proxy.forwarding, self.attempt
        if forwarding is None or attempt is None or not forwarding.owns(booking):
            return
        if forwarding.responded(booking, attempt.response.credit) and self.proxy.queue:
            self.proxy.on_credit()

    def left_peer(self, booking: Booking) -> None:
        forwarding = self.proxy.forwarding
        if forwarding is not None and forwarding.ended(booking, self.ending.bytes_out) and self.proxy.queue:
            self.proxy.on_credit()

    def is_full(self, response: ResponseHead, body: bytes) -> bool:
        """Return whether the response is a peer's refusal for want of room."""
        booking = self.booking
        forwarding = self.proxy.forwarding
        is_peer = forwarding is not None and booking is not None and forwarding.owns(booking)
        return is_peer and response.status == 429 and FULL in body

    def _queue_again(self) -> None:
        """A peer had no room: wait here, at the old place."""
        proxy, booking = self.proxy, self.booking
        assert booking is not None  # noqa: S101 (for the type checker)
        now = proxy.clock()
        if proxy.forwarding is not None:
            proxy.forwarding.returned(booking)
        proxy.metrics.peers.of(booking.key.id).returned += 1
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
