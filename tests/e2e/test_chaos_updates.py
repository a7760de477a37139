"""Updates that no client notices. The long version: benchmarks/chaos/updates.py."""

from collections.abc import Iterator

import pytest

from benchmarks.chaos.harness import Stack
from benchmarks.chaos.traffic import tally
from benchmarks.chaos.updates import NAME, mixed, outlived, spec, update
from policies.goals import UpdateMode

pytestmark = pytest.mark.long

STREAM_S = 2.0
REPLICAS = 2
# The engines write every token of a stream in its turn, twice as many of them during a switch. A machine that cannot keep
# up with open-loop traffic would fail for want of CPU, which is not what these tests are about.
STREAMS_AT_ONCE = 4


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as stack:
        stack.up(spec(REPLICAS, "v1", STREAM_S))
        yield stack


@pytest.mark.parametrize(
    ("mode", "model"),
    [(UpdateMode.ROLLING, "v2"), (UpdateMode.BLUE_GREEN, "v3")],
    ids=["rolling", "blue-green"],
)
def test_an_update_fails_no_request_and_cuts_no_stream(stack: Stack, mode: UpdateMode, model: str) -> None:
    stack.settled(NAME)
    finding = update(
        stack,
        mode,
        replicas=REPLICAS,
        model=model,
        rate=10,
        stream_s=STREAM_S,
        streams_at_once=STREAMS_AT_ONCE,
    )
    assert tally(finding.unary) == {}
    assert tally(finding.streams) == {}
    assert outlived(finding, model), "no stream was under way at the switch: not the case to test"
    assert {outcome.model for outcome in finding.unary[-REPLICAS:]} == {model}
    if mode is UpdateMode.BLUE_GREEN:
        assert mixed(finding.unary, model) == []
        assert mixed(finding.streams, model) == []
