"""SIGKILL of the controller and of the load balancer. The long versions: benchmarks/chaos/kill_*.py."""

from collections.abc import Iterator

import pytest

from benchmarks.chaos import kill_balancer
from benchmarks.chaos.harness import Stack
from benchmarks.chaos.kill_controller import Script, audit, run
from benchmarks.chaos.service_files import service_yaml
from benchmarks.chaos.traffic import tally

pytestmark = pytest.mark.long


@pytest.fixture
def stack() -> Iterator[Stack]:
    with Stack() as stack:
        yield stack


def test_a_controller_that_is_killed_leaves_no_trace_in_the_books(stack: Stack) -> None:
    script = Script(stack)
    deeds = (script.coming_up, script.rolling, script.preempt, script.coming_down)
    traffic, kills = run(stack, script, deeds, kills=5, seed=7, longest_life_s=1.5, rate=10)
    assert kills >= 5
    assert audit(stack, script) == []
    assert tally(traffic.outcomes) == {}


def test_a_load_balancer_that_is_killed_comes_back_with_its_table(stack: Stack) -> None:
    name = kill_balancer.NAME
    stack.up(service_yaml(name, 2))
    ready = stack.settled(name)
    table = stack.listed(name)
    assert table == {str(replica_id): "ready" for replica_id in ready}
    kill_balancer.kill(stack)
    kill_balancer.kill(stack, with_controller=True)
    assert stack.settled(name) == ready
    assert stack.listed(name) == table
