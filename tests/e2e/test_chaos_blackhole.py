"""A replica that is down and still listed costs no request. The long version: benchmarks/chaos/blackhole.py."""

from collections.abc import Iterator

import pytest

from benchmarks.chaos.blackhole import FAULTS, NAME, measure
from benchmarks.chaos.harness import Stack
from benchmarks.chaos.service_files import service_yaml
from benchmarks.chaos.traffic import tally

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as stack:
        stack.up(service_yaml(NAME, 3, policy="least_load"))
        yield stack


@pytest.mark.parametrize("fault", FAULTS)
def test_no_request_fails_while_a_dead_replica_stays_listed(stack: Stack, fault: str) -> None:
    finding = measure(stack, fault, alone=True, seconds=2, rate=20)
    assert finding.listed, "somebody took it out of the table: not the case to test"
    assert finding.ejections > 0
    assert len(finding.outcomes) > 20
    assert tally(finding.outcomes) == {}
