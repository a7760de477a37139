"""The rows of the tables: who knows which replicas, by which rules inside a region and between regions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lb.config.options import PushMode


@dataclass(frozen=True, slots=True)
class Rule:
    """`inner` chooses a replica, `outer` a region. `all_view`: every agent has every replica in its table.

    `central` is the region of the only agent, if there is only one. `distances`: the table knows the round trip to replicas.
    """

    name: str
    inner: str = "gorgo"
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
            Rule("skywalker", inner="prefix_tree", push=PushMode.SELECTIVE, outer="skywalker"),
            Rule("gorgo", push=PushMode.SELECTIVE, outer="gorgo"),
            Rule("central_gorgo", push=PushMode.SELECTIVE, central="us", all_view=True),
            Rule("one_cost", outer="one_cost"),
        )
    }
)
