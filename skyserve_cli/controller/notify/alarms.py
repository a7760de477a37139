"""Which conditions are notified of now. Pure.

A notification reports that a condition has started, another one that it is over. Of one kind of one service at most one begins per
QUIET_S, however often it comes and goes; if it is still the case after that time, it is notified of then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from skyserve_cli.controller.notify.conditions import Condition
from skyserve_cli.state.outbox import Alarm, Key

QUIET_S = 600.0
_NEW = Alarm(since=None, notified_at=None, announced=False)


class Notice(NamedTuple):
    """`begins`: the condition has started, else it is over."""

    service: str
    kind: str
    begins: bool
    text: str


def decide(
    alarms: Mapping[Key, Alarm], found: Mapping[Key, Condition], now: float, known: Collection[str]
) -> tuple[dict[Key, Alarm], list[Notice]]:
    """Return the alarms from now on, and what to send. Of kinds that are not `known` nothing changes."""
    kept, notices = dict[Key, Alarm](), list[Notice]()
    for key in sorted({*alarms, *found}):
        before, condition = alarms.get(key, _NEW), found.get(key)
        if key[1] not in known:
            kept[key] = before
            continue
        after, text = _started(before, condition, now) if condition else _over(before, key, now)
        if text:
            notices.append(Notice(*key, begins=after.announced, text=text))
        if after.since is not None or _is_quiet(after, now):
            kept[key] = after
    return kept, notices


def _started(before: Alarm, condition: Condition, now: float) -> tuple[Alarm, str]:
    since = now if before.since is None else min(before.since, now)  # the clock may have been set back
    if before.announced or now - since < condition.after_s or _is_quiet(before, now):
        return before._replace(since=since), ""
    return Alarm(since, now, announced=True), condition.text


def _over(before: Alarm, key: Key, now: float) -> tuple[Alarm, str]:
    service, kind = key
    about = f"{service}: " if service else ""
    return before._replace(since=None, announced=False), f"{about}{kind} is over" if before.announced else ""


def _is_quiet(alarm: Alarm, now: float) -> bool:
    return alarm.notified_at is not None and 0.0 <= now - alarm.notified_at < QUIET_S
