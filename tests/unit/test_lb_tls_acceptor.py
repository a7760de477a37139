"""Which connection gives its place to another one while as many handshakes run as may, and when."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lb.http.tls_acceptor import HANDSHAKE_S, next_to_close, times_s

SILENT_S, SPEAKING_S = 0.25, 1.0


@dataclass(frozen=True)
class Arrival:
    since: float
    spoken: bool

    def has_spoken(self) -> bool:
        return self.spoken


def silent(since: float) -> Arrival:
    return Arrival(since, False)


def speaking(since: float) -> Arrival:
    return Arrival(since, True)


@pytest.mark.parametrize(
    ("waiting", "index", "due_at"),
    [
        ([silent(1.0), silent(1.5)], 0, 1.0 + SILENT_S),
        ([speaking(1.0), speaking(1.5)], 0, 1.0 + SPEAKING_S),
        ([silent(1.0), speaking(1.1)], 0, 1.0 + SILENT_S),
        ([speaking(1.0), silent(1.1)], 1, 1.1 + SILENT_S),
        ([speaking(1.0), speaking(1.1), silent(1.2), silent(1.3)], 2, 1.2 + SILENT_S),
        ([speaking(1.0), silent(1.0 + SPEAKING_S)], 0, 1.0 + SPEAKING_S),
        ([speaking(1.0), silent(1.0 + SPEAKING_S - SILENT_S / 2)], 0, 1.0 + SPEAKING_S),
    ],
    ids=[
        "the oldest of the silent ones",
        "the oldest of those that have spoken",
        "a silent one that is older",
        "a silent one whose time is over sooner",
        "the oldest silent one among several",
        "one that has spoken long ago",
        "one that has spoken, and whose time is over sooner",
    ],
)
def test_whose_place_is_freed_and_when(waiting: list[Arrival], index: int, due_at: float) -> None:
    assert next_to_close(waiting, SILENT_S, SPEAKING_S) == (waiting[index], due_at)


def test_without_connections_there_is_no_place_to_free() -> None:
    assert next_to_close([], SILENT_S, SPEAKING_S) is None


@pytest.mark.parametrize(
    ("places", "silent_s", "speaking_s"),
    [(0, 0.2, 1.0), (22, 0.2, 1.0), (400, 0.4, 2.0), (5000, 1.0, HANDSHAKE_S)],
)
def test_places_are_freed_the_sooner_the_fewer_there_are(
    places: int, silent_s: float, speaking_s: float
) -> None:
    assert times_s(places) == pytest.approx((silent_s, speaking_s))
