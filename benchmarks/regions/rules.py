"""The rows of the tables: who knows which replicas, by which rules inside a region and between regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks import routing_published
from lb.config.options import PushMode
from policies.routing.base import RoutingPolicy
from policies.routing.gorgo import Gorgo
from policies.routing.registry import make_policy


def plain_cost(_: str) -> RoutingPolicy:
    """Return GORGO without what we add for others: its cost is network + prefill + queue + decode pressure."""
    return Gorgo(copy_weight=0.0, prefill_weight=1.0)


@dataclass(frozen=True, slots=True)
class Rule:
    """`inner`, made by `make_inner`, chooses a replica, `outer` a region. `all_view`: every agent has every replica in its table.

    `central` is the region of the only agent, if there is only one. `distances`: the table knows the round trip to replicas.
    """

    name: str
    inner: str = "gorgo"
    make_inner: Callable[[str], RoutingPolicy] = make_policy
    push: PushMode = PushMode.WORK
    outer: str = "local"
    all_view: bool = False
    distances: bool = True
    central: str = ""


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            Rule("local"),
            Rule("all_view", all_view=True, distances=False),
            Rule("all_view_rtt", all_view=True),
            Rule("all_view_plain", make_inner=plain_cost, all_view=True, distances=False),
            Rule(
                "skywalker",
                inner="skywalker",
                make_inner=routing_published.make_policy,
                push=PushMode.SELECTIVE,
                outer="skywalker",
            ),
            Rule("gorgo", make_inner=plain_cost, push=PushMode.SELECTIVE, outer="gorgo"),
            Rule(
                "central_gorgo",
                make_inner=plain_cost,
                push=PushMode.SELECTIVE,
                central="us",
                all_view=True,
            ),
            Rule("one_cost", outer="one_cost"),
        )
    }
)
