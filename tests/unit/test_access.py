"""Which rules should exist: the decision alone."""

from __future__ import annotations

import pytest

from provisioners.port.firewall import (
    ANYWHERE,
    FirewallAccess,
    Opening,
    block_of,
    blocks,
    changes,
    openings,
    ports_of_text,
    ports_text,
)

HERE, AGENT = "203.0.113.7/32", "198.51.100.1/32"


def test_by_default_nothing_is_open_to_everybody() -> None:
    access = FirewallAccess(frozenset({HERE}), {"chat": frozenset({AGENT})})
    found = openings(access, "chat", (8000, 9000), ())
    assert found == {
        Opening(22, HERE),
        *(Opening(port, block) for port in (8000, 9000) for block in (HERE, AGENT)),
    }
    assert all(one.source != ANYWHERE for one in found)


def test_load_balancers_of_other_services_and_ssh_are_apart() -> None:
    access = FirewallAccess(frozenset({HERE}), {"other": frozenset({AGENT})})
    assert openings(access, "chat", (8000,), ()) == {Opening(22, HERE), Opening(8000, HERE)}


def test_without_anybody_nothing_is_open_but_public_ports() -> None:
    assert openings(FirewallAccess(), "chat", (8000,), (443,)) == {Opening(443, ANYWHERE)}


def test_blocks_that_another_contains_are_left_out() -> None:
    assert blocks(["10.0.0.9/8", "10.1.0.0/16", "2001:db8::1/128", ANYWHERE]) == (ANYWHERE, "2001:db8::1/128")
    with pytest.raises(ValueError, match="everywhere"):
        blocks(["everywhere"])


def test_rules_of_ports_that_are_not_ours_stay() -> None:
    wanted = frozenset({Opening(22, HERE)})
    found = frozenset({Opening(22, AGENT), Opening(8000, ANYWHERE), Opening(1194, ANYWHERE)})
    change = changes(wanted, found, (8000,))
    assert change.to_open == wanted
    assert change.to_close == {Opening(22, AGENT), Opening(8000, ANYWHERE)}


def test_a_name_is_no_block() -> None:
    assert [block_of(one) for one in ("192.0.2.1", "2001:db8::1", "agent.example")] == [
        "192.0.2.1/32",
        "2001:db8::1/128",
        None,
    ]


def test_ports_survive_a_tag() -> None:
    assert ports_of_text(ports_text((9000, 8000, 8000))) == (8000, 9000)
    assert ports_of_text("") == ()
