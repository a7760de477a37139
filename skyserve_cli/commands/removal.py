"""Removing what a look at the clouds has found: instances first, what they left next, what they shared last."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from skyserve_cli.commands.options import View
from skyserve_cli.controller.clouds.garbage_collector import Key
from skyserve_cli.output import inform, span, usd
from skyserve_cli.text_tables import FittedTable

GONE_PATIENCE_S = 300.0  # an instance that is terminated takes a minute or two
POLL_S = 3.0
TRIES = 20  # of what may be removed another time: a card that holds an address goes first


class OrphanRemover(Protocol):
    """Who does the work."""

    def inspect(self, cloud: str) -> View: ...

    def remove(self, orphan: View) -> View: ...

    def forget(self, cloud: str) -> Sequence[str]: ...


def remove_all(hands: OrphanRemover, found: Sequence[View]) -> tuple[list[View], list[View]]:
    """Instances first, what they left next, what they shared last. A line as each is gone, or is not."""
    failed: list[View] = []
    removed: list[View] = []

    def note(orphan: View, why: str) -> None:
        if why:
            failed.append(orphan | {"why": why})
            inform(f"{named(orphan)} is left: {why}")
        else:
            removed.append(orphan)
            inform(f"removed {named(orphan)}")

    instances = [orphan for orphan in found if orphan["part"] == "instance"]
    refusals = {key_of(orphan): _insist(hands, orphan) for orphan in instances}
    still = _await_gone(hands, [orphan for orphan in instances if not refusals[key_of(orphan)]])
    for orphan in instances:
        lives = "it has been asked to end, and the cloud still lists it" if key_of(orphan) in still else ""
        note(orphan, refusals[key_of(orphan)] or lives)
    for orphan in found:
        if orphan["part"] == "leftover":
            note(orphan, _insist(hands, orphan))
    shared = [orphan for orphan in found if orphan["part"] == "shared"]
    for cloud in sorted({orphan["cloud"] for orphan in shared}):
        of_cloud = [orphan for orphan in shared if orphan["cloud"] == cloud]
        problems = hands.forget(cloud)
        left = _left(hands, of_cloud) if problems else set()
        for orphan in of_cloud:
            note(orphan, "; ".join(problems) if key_of(orphan) in left else "")
    return removed, failed


def _left(hands: OrphanRemover, shared: Sequence[View]) -> set[Key]:
    """Return its remains after something went wrong; all of it, where it is unknown."""
    keys = {key_of(orphan) for orphan in shared}
    listed = {key_of(orphan) for orphan in hands.inspect(shared[0]["cloud"])["orphans"]}
    return keys & listed or keys


def _insist(hands: OrphanRemover, orphan: View) -> str:
    """Remove it; why not, if it cannot be."""
    for _ in range(TRIES):
        refusal = hands.remove(orphan)
        if not refusal["passes"]:
            break
        time.sleep(POLL_S)
    return str(refusal["why"])


def _await_gone(hands: OrphanRemover, instances: Sequence[View]) -> set[Key]:
    """Return the keys of those that the clouds still list in the end."""
    waited = {key_of(orphan): orphan["cloud"] for orphan in instances}
    for _ in range(int(GONE_PATIENCE_S / POLL_S)):
        for cloud in sorted(set(waited.values())):
            look = hands.inspect(cloud)
            listed = {key_of(orphan) for orphan in look["orphans"]}
            if not look["unlisted"]:
                waited = {key: at for key, at in waited.items() if at != cloud or key in listed}
        if not waited:
            break
        time.sleep(POLL_S)
    return set(waited)


def stray_table(found: Sequence[View], now: float) -> FittedTable:
    return FittedTable(
        ("CLOUD", "REGION", "KIND", "$/MONTH", "AGE", "ID"),
        [
            (
                orphan["cloud"],
                orphan["region"],
                orphan["kind"],
                "-" if orphan["usd_month"] is None else usd(orphan["usd_month"]),
                "-" if orphan["created_at"] is None else span(now - orphan["created_at"]),
                orphan["id"],
            )
            for orphan in found
        ],
    )


def cost(found: Sequence[View]) -> str:
    month = sum(orphan["usd_month"] or 0.0 for orphan in found)
    return f", about ${usd(month)} per month" if month else ""


def named(orphan: View) -> str:
    return f"{orphan['kind']} {orphan['id']} in {where(orphan)}"


def where(thing: Mapping[str, object]) -> str:
    return "/".join(str(thing[key]) for key in ("cloud", "region") if thing[key])


def key_of(orphan: View) -> Key:
    return orphan["cloud"], orphan["kind"], orphan["id"], orphan["region"]
