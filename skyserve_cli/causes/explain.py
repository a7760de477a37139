"""The account of a service or of a replica: the cause first, the next command last, at most ten lines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from skyserve_cli.causes import log_rules, probe_rules, service_rules
from skyserve_cli.causes.facts import Facts, View, is_updating
from skyserve_cli.causes.log_text import LINE_CHARS, last_line, quoted
from skyserve_cli.causes.rule import Found, Rule
from skyserve_cli.output import clock_time, place, plural, span

MOST_LINES = 10
MOST_EVENTS = 3
WELL = "well"

#: What a replica shows by itself, the most precise first.
REPLICA = (
    *log_rules.RULES,
    *probe_rules.RULES,
    *probe_rules.NOT_LISTENING,
    *service_rules.LAUNCHES,
)


class Explanation(NamedTuple):
    """`line` is the cause as a sentence, `next` what to try, "" if the service is well."""

    cause: str
    line: str
    story: tuple[str, ...]
    next: str

    def lines(self, name: str) -> list[str]:
        """Return what is printed."""
        end = [f"next: {self.next}"] if self.next else []
        return [f"{name}: {self.line}", *self.story, *end]

    def view(self) -> dict[str, Any]:
        return self._asdict()


def explain(facts: Facts) -> Explanation:
    """Return the account of the replica that is asked for, else of the service."""
    cause, found = _cause(facts)
    if found is None:
        return Explanation(WELL, quoted(_well(facts)), (), "")
    details = [quoted(line) for line in _details(facts, cause, found)]
    return Explanation(cause, quoted(found.sentence), tuple(details[: MOST_LINES - 2]), found.next)


def _cause(facts: Facts) -> tuple[str, Found | None]:
    if facts.asked:
        return _first((*REPLICA, log_rules.OTHER_END, _OF_REPLICA), facts) or (WELL, None)
    is_short = facts.is_short or bool(facts.view.get("trial"))
    has_own = is_short or is_updating(facts.view) or facts.state in ("READY", "NOT_READY")
    rules = [
        *service_rules.STATUS,
        *(service_rules.LIMITS if is_short else ()),
        *((*REPLICA, service_rules.CRASHES, log_rules.OTHER_END) if has_own else ()),
        *(service_rules.SHORTAGES if is_short or not facts.view["ready"] else ()),
        *service_rules.SERVING,
    ]
    return _first(rules, facts) or (WELL, None)


def _first(rules: Iterable[Rule], facts: Facts) -> tuple[str, Found] | None:
    for rule in rules:
        found = rule.recognise(facts)
        if found is not None:
            return rule.cause, found
    return None


def _ended_or_on_its_way(facts: Facts) -> Found | None:
    """Return what a replica does that nothing is wrong with; None if it is ready."""
    replica = facts.replica
    if replica is None or facts.state == "READY":
        return None
    said = quoted(replica["message"] or "", 90)
    if replica["end_reason"]:
        sentence = f"{facts.who} ended on purpose ({facts.reason}){said and f': {said}'}"
        return Found(sentence, f"serve events {facts.name}")
    sentence = (
        f"{facts.who} has been {facts.state} for {span(facts.now - replica['since'])}{said and f': {said}'}"
    )
    return Found(sentence, f"serve logs {facts.name} {replica['id']} -f")


_OF_REPLICA = Rule("replica", _ended_or_on_its_way)


def _well(facts: Facts) -> str:
    view, replica = facts.view, facts.replica
    last = next((_event(event) for event in reversed(facts.events)), "")
    did = f"; last: {last}" if last else ""
    if facts.asked and replica is not None:
        since = replica["ready_at"] or replica["since"]
        return f"{facts.who} is well: READY for {span(facts.now - since)} in {place(replica)}{did}"
    return f"the service is well: {view['ready']} of {plural(view['wanted'], 'replica')} ready, version {view['version']} serves{did}"


def _details(facts: Facts, cause: str, found: Found) -> Iterator[str]:
    """Yield what else is known, the most useful first."""
    view = facts.view
    if found.line:
        yield f"its log: {quoted(found.line, LINE_CHARS - 9)}"
    elif facts.log and facts.replica is not None and (facts.reason or facts.state == "STARTING"):
        line = quoted(last_line(facts.log), LINE_CHARS - 19)
        if line not in found.sentence:
            yield f"its last log line: {line}"
    if facts.replica is not None:
        yield _replica_line(facts, facts.replica)
        yield from _alike(view, facts.replica)
    newest, serves = view["version"], view["serving_version"]
    if newest in view["failed_versions"] and cause != "version_given_up":
        yield f"version {newest} was given up; " + (
            "nothing serves" if serves is None else f"version {serves} serves"
        )
    yield f"status {view['status']}: {view['ready']} of {plural(view['wanted'], 'replica')} ready, version {newest}"
    if facts.notes:
        yield f"note: {quoted(facts.notes, LINE_CHARS - 6)}"
    for event in facts.events[-MOST_EVENTS:]:
        yield f"{clock_time(event['at'])}  {_event(event)}"


def _replica_line(facts: Facts, replica: View) -> str:
    where = f"{facts.who} in {place(replica)}"
    if replica["end_reason"]:
        ago = span(facts.now - (replica["ended_at"] or replica["since"]))
        return f"{where} ended {ago} ago: {replica['end_reason']}, {quoted(replica['message'], 120)}"
    return f"{where} has been {replica['state']} for {span(facts.now - replica['since'])}"


def _alike(view: View, replica: View) -> Iterator[str]:
    """Yield how many others ended for the same reason."""
    others = sum(
        r["end_reason"] == replica["end_reason"] and r["id"] != replica["id"] for r in view["replicas"]
    )
    if replica["end_reason"] and others:
        yield f"{plural(others, 'other replica')} ended with {replica['end_reason']} within the last hour"


def _event(event: View) -> str:
    """Return an event on one line: ``replica 3 RunExited -> TERMINATING: `run` ended with exit code 1``."""
    who = f"replica {event['replica_id']} " if event["replica_id"] is not None else ""
    state = f" -> {event['state']}" if event["state"] and event["replica_id"] is not None else ""
    said = f": {quoted(event['message'], 120)}" if event["message"] else ""
    return f"{who}{event['words']}{state}{said}"
