"""What is printed while a command waits."""

from __future__ import annotations

from typing import Any

from skyserve_cli.commands.progress import TROUBLE_LASTS_S, Troubles


def view(*troubles: str) -> dict[str, Any]:
    agents = [{"id": number, "trouble": trouble} for number, trouble in enumerate(troubles, 1)]
    return {"name": "chat", "load_balancers": agents}


def told(troubles: Troubles, now: float, *seen: str) -> list[str]:
    return [line.split("  ", 1)[1] for line in troubles.new_lines([view(*seen)], now)]


def test_a_trouble_that_lasts_is_told_once() -> None:
    troubles = Troubles()
    assert told(troubles, 0.0, "", "no pip") == []
    assert told(troubles, TROUBLE_LASTS_S - 0.1, "", "no pip") == []
    assert told(troubles, TROUBLE_LASTS_S, "", "no pip") == ["load balancer 2  no pip"]
    assert told(troubles, 60.0, "", "no pip") == []
    assert told(troubles, 61.0, "", "no disk") == []
    assert told(troubles, 61.0 + TROUBLE_LASTS_S, "", "no disk") == ["load balancer 2  no disk"]


def test_what_is_over_soon_is_not_told() -> None:
    troubles = Troubles()
    for at in range(10):
        assert told(troubles, 2.0 * at, "not yet" if at % 2 else "") == []
