"""A client that leaves is noticed by the replica. With figures: benchmarks/chaos/leavers.py."""

from collections.abc import Iterator

import pytest

from benchmarks.chaos.harness import Stack, until
from benchmarks.chaos.leavers import NAME, WAYS, leave
from benchmarks.chaos.service_files import service_yaml

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as stack:
        stack.up(service_yaml(NAME, 1, speed=1.0))
        stack.settled(NAME)
        yield stack


@pytest.mark.parametrize("way", WAYS)
def test_the_engine_is_rid_of_a_client_that_left(stack: Stack, way: str) -> None:
    """By itself the request would take minutes: 4,000 tokens at 67 ms."""
    (replica,) = stack.replicas(NAME, "READY")
    leave(stack.endpoint(NAME), replica["endpoint"], way)
    target = str(replica["id"])
    until(lambda: stack.stats(NAME)[target]["in_flight"] == 0, "the load balancer still counts it")
