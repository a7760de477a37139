"""Removing what a look at the clouds has found: instances first, what they left next, what they shared last."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from skyserve_cli.commands.options import View
from skyserve_cli.controller.clouds.garbage_collector import Key
from skyserve_cli.output import say, span, usd
from skyserve_cli.tables import Fitted, table

GONE_PATIENCE_S = 300.0  # an instance that is asked to end takes a minute or two
POLL_S = 3.0
TRIES = 20  # of what may be removed another time: a card that holds an address goes first


class Hands(Protocol):
    """Who does the work."""

    def look(self, cloud: str) -> View: ...

    def remove(self, stray: View) -> View: ...

    def forget(self, cloud: str) -> Sequence[str]: ...


def remove_all(hands: Hands, found: Sequence[View]) -> tuple[list[View], list[View]]:
    """Instances first, what they left next, what they shared last. A line as each is gone, or is not."""
    failed: list[View] = []
    removed: list[View] = []

    def note(stray: View, why: str) -> None:
        if why:
            failed.append(stray | {"why": why})
            say(f"{named(stray)} is left: {why}")
        else:
            removed.append(stray)
            say(f"removed {named(stray)}")

    instances = [stray for stray in found if stray["part"] == "instance"]
    refusals = {key_of(stray): _insist(hands, stray) for stray in instances}
    still = _await_gone(hands, [stray for stray in instances if not refusals[key_of(stray)]])
    for stray in instances:
        lives = "it has been asked to end, and the cloud still lists it" if key_of(stray) in still else ""
        note(stray, refusals[key_of(stray)] or lives)
    for stray in found:
        if stray["part"] == "leftover":
            note(stray, _insist(hands, stray))
    shared = [stray for stray in found if stray["part"] == "shared"]
    for cloud in sorted({stray["cloud"] for stray in shared}):
        of_cloud = [stray for stray in shared if stray["cloud"] == cloud]
        problems = hands.forget(cloud)
        left = _left(hands, of_cloud) if problems else set()
        for stray in of_cloud:
            note(stray, "; ".join(problems) if key_of(stray) in left else "")
    return removed, failed


def _left(hands: Hands, shared: Sequence[View]) -> set[Key]:
    """What is there of it after something went wrong; all of it, where nobody can tell."""
    keys = {key_of(stray) for stray in shared}
    listed = {key_of(stray) for stray in hands.look(shared[0]["cloud"])["strays"]}
    return keys & listed or keys


def _insist(hands: Hands, stray: View) -> str:
    """Remove it; why not, if it cannot be."""
    for _ in range(TRIES):
        refusal = hands.remove(stray)
        if not refusal["passes"]:
            break
        time.sleep(POLL_S)
    return str(refusal["why"])


def _await_gone(hands: Hands, instances: Sequence[View]) -> set[Key]:
    """The keys of those that the clouds still list in the end."""
    waited = {key_of(stray): stray["cloud"] for stray in instances}
    for _ in range(int(GONE_PATIENCE_S / POLL_S)):
        for cloud in sorted(set(waited.values())):
            look = hands.look(cloud)
            listed = {key_of(stray) for stray in look["strays"]}
            if not look["unlisted"]:
                waited = {key: at for key, at in waited.items() if at != cloud or key in listed}
        if not waited:
            break
        time.sleep(POLL_S)
    return set(waited)


def stray_table(found: Sequence[View], now: float) -> Fitted:
    return table(
        ("CLOUD", "REGION", "KIND", "$/MONTH", "AGE", "ID"),
        [
            (
                stray["cloud"],
                stray["region"],
                stray["kind"],
                "-" if stray["usd_month"] is None else usd(stray["usd_month"]),
                "-" if stray["created_at"] is None else span(now - stray["created_at"]),
                stray["id"],
            )
            for stray in found
        ],
    )


def cost(found: Sequence[View]) -> str:
    month = sum(stray["usd_month"] or 0.0 for stray in found)
    return f", about ${usd(month)} per month" if month else ""


def named(stray: View) -> str:
    return f"{stray['kind']} {stray['id']} in {where(stray)}"


def where(thing: Mapping[str, object]) -> str:
    return "/".join(str(thing[key]) for key in ("cloud", "region") if thing[key])


def key_of(stray: View) -> Key:
    return stray["cloud"], stray["kind"], stray["id"], stray["region"]
