"""What a service file accepts has an effect: keys of the load balancer reach its table, names of placers are registered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.goals import Goal, ScalingGoal
from policies.registry import PLACERS
from skyserve_cli.controller.reconcile.lb_config import table_of
from skyserve_cli.spec import LoadBalancerSpec, ServiceSpec
from skyserve_cli.spec.balancer import LoadBalancerSection
from skyserve_cli.spec.codec import LIMITS
from skyserve_cli.spec.editor_schema import json_schema
from skyserve_cli.spec.load import load_text
from skyserve_cli.spec.placement import ALIASES, AUTO

KEYS = {
    name: field.default
    for name, field in LoadBalancerSection.model_fields.items()
    if isinstance(field.default, bool | int | float)
}
ACCEPTED = json_schema()["$defs"]["ReplicaPolicySection"]["properties"]["spot_placer"]


def revision(balancer: LoadBalancerSpec) -> str:
    return table_of(
        "s", ServiceSpec("s", "run", load_balancer=balancer), (), Goal(1, ScalingGoal()), {}, 0.0
    ).revision


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_the_load_balancer_reaches_the_spec(key: str) -> None:
    default = KEYS[key]
    other = not default if isinstance(default, bool) else default + 1
    spec = load_text(f"service: {{load_balancer: {{{key}: {str(other).lower()}}}}}\nrun: serve").spec
    assert spec.load_balancer != LoadBalancerSpec()


@pytest.mark.parametrize("name", LIMITS.values())
def test_a_limit_of_the_spec_reaches_the_table(name: str) -> None:
    plain = LoadBalancerSpec()
    limits = replace(plain.limits, **{name: getattr(plain.limits, name) + 1})
    assert revision(replace(plain, limits=limits)) != revision(plain)


def accepted_placers() -> list[str]:
    """The names that `spot_placer` takes."""
    found = ACCEPTED.get("enum") or next(one["enum"] for one in ACCEPTED["anyOf"] if "enum" in one)
    return [name for name in found if name != "auto"]


@pytest.mark.parametrize("name", accepted_placers())
def test_a_placer_that_a_file_may_name_is_registered(name: str) -> None:
    assert ALIASES.get(name, name) in PLACERS


def test_auto_and_every_alias_stand_for_a_placer() -> None:
    assert {AUTO, *ALIASES.values()} <= set(PLACERS)
