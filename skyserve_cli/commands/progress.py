"""Follows the event log until a condition holds; on a terminal also shows the live replicas."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.live import Live

from skyserve_cli.commands.log_streams import LastLines
from skyserve_cli.commands.options import View, only_name
from skyserve_cli.commands.sentences import exit_message, live_replicas, timed_out, words
from skyserve_cli.controller.api.client import AWAY, ControllerClient, RefusedError
from skyserve_cli.controller.api.waiting import DeadlineError
from skyserve_cli.controller.reconcile.clock import SystemClock
from skyserve_cli.output import DEADLINE, CommandFailed, clock_time, inform, place, span
from skyserve_cli.state.values import AGENT_WORD
from skyserve_cli.text_tables import FittedTable, console

POLL_S = 0.2
LOG_LINES_SHOWN = 10
LOG_TRIES = 10
_GIVES_UP = frozenset(
    {"CONFIG", "SETUP_FAILED", "RUN_EXITED", "START_TIMEOUT", "PROBE_FAILED", "ONLY_ERRORS"}
)
AWAY_PATIENCE_S = 30.0
CALL_TIMEOUT_S = 600.0  # of one call while a command waits for replicas: a slow database ends no such wait
STEADY_S = 2.0  # within which a program ends that has only started a server
TROUBLE_LASTS_S = 3.0  # shorter trouble belongs to coming up


def last_event(client: ControllerClient) -> int:
    """Return the number of the last event: later ones are new."""
    newest = client.events(None, newest=True, limit=1)
    return int(newest[-1]["seq"]) if newest else 0


def follow(
    client: ControllerClient,
    names: frozenset[str],
    *,
    after: int,
    timeout_s: float | None,
    done: Callable[[dict[str, View]], bool],
) -> None:
    """Report what happens to `names` until `done` returns true for their views by name (down ones included).

    A controller that fails meanwhile is given `AWAY_PATIENCE_S` to come back. Raises CommandFailed after
    `timeout_s`, ControllerDownError, and what `done` raises.
    """
    try:
        with client.waiting.within(timeout_s, CALL_TIMEOUT_S):
            _follow(client, names, after, timeout_s, done)
    except DeadlineError as error:
        raise DeadlineError(f"{error}; it goes on without this command") from None


def _follow(
    client: ControllerClient,
    names: frozenset[str],
    after: int,
    timeout_s: float | None,
    done: Callable[[dict[str, View]], bool],
) -> None:
    clock = SystemClock()
    began = responded = clock.now()
    troubles = Troubles()
    with _live(client) as show:
        while True:
            try:
                # The views first: all that they show has its event already, still shown before the end.
                views = {
                    view["name"]: view
                    for view in client.services(only_name(names), down=True)
                    if view["name"] in names
                }
                events = client.events(None, after=after)
                responded = clock.now()
            except AWAY:
                if clock.now() - responded > AWAY_PATIENCE_S:
                    raise
                time.sleep(POLL_S)
                continue
            for event in events:
                after = event["seq"]
                if event["service"] in names:
                    inform(event_line(event, with_service=len(names) > 1))
                    for line in _log_tail(client, event):
                        inform(f"  | {line}")
            for line in troubles.new_lines(views.values(), clock.now()):
                inform(line)
            finished = done(views)
            show(list(views.values()), clock.now())
            if finished:
                return
            if timeout_s is not None and clock.now() - began > timeout_s:
                raise CommandFailed(timed_out(timeout_s), DEADLINE)
            time.sleep(POLL_S)


class Troubles:
    """Of load balancer agents on machines of their own: what keeps one from serving is no event, for it may last."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int, str], float] = {}
        self._shown: set[tuple[str, int, str]] = set()

    def new_lines(self, views: Iterable[View], now: float) -> list[str]:
        """Return a line for each trouble that has lasted; each is shown once."""
        there = {
            (view["name"], agent["id"], agent["trouble"])
            for view in views
            for agent in view["load_balancers"]
            if agent["trouble"]
        }
        self._since = {each: self._since.get(each, now) for each in there}
        lines = [each for each in there - self._shown if now - self._since[each] >= TROUBLE_LASTS_S]
        self._shown.update(lines)
        return [f"{clock_time(now)}  load balancer {number}  {why}" for _, number, why in sorted(lines)]


def event_line(event: View, *, with_service: bool) -> str:
    """Return the line of an event.

    ``12:13:14  replica 2  probe passed -> READY: …``, or ``12:13:14  replica 2  running setup``
    """
    whose = f"{event['service']}  " if with_service else ""
    kind, who = event["kind"], "replica"
    if kind.startswith(AGENT_WORD):
        kind, who = kind.removeprefix(AGENT_WORD), "load balancer"
    if event["replica_id"] is not None:
        whose += f"{who} {event['replica_id']}  "
    if kind == "Progressed":
        return f"{clock_time(event['at'])}  {whose}{event['message']}"
    what = words(kind) + (f" -> {event['state']}" if event["state"] else "")
    said = f": {event['message']}" if event["message"] else ""
    return f"{clock_time(event['at'])}  {whose}{what}{said}"


def _log_tail(client: ControllerClient, event: View) -> list[str]:
    """Return what a replica printed last, if that is why it terminated.

    For a moment it is not available: it is being read from the machine before it goes.
    """
    if event["kind"] not in ("BootstrapFailed", "RunExited", "GaveUp"):
        return []
    for _ in range(LOG_TRIES):
        lines = log_tail(client, f"replica/{event['service']}/{event['replica_id']}", LOG_LINES_SHOWN)
        if lines:
            return lines
        time.sleep(POLL_S)
    return []


def serves(view: View, replicas: int) -> bool:
    """Return whether requests are served: `replicas` of them are ready, and the load balancer knows them."""
    agents = [view["load_balancer"]] if view["load_balancer"] else wanted_agents(view)
    if view["ready"] < replicas or not agents or not all(one["alive"] and one["synced"] for one in agents):
        return False
    known = [agent["ready_targets"] for agent in agents]
    shared = (
        agents[0].get("owned") is not None
    )  # each has the replicas of its region, and all have each other
    return bool((sum(known) if shared else min(known)) >= replicas)


class Steady:
    """Notices replicas that are ready for a moment only."""

    def __init__(self) -> None:
        self._ready: frozenset[int] = frozenset()
        self._since = 0.0

    def lasts(self, view: View, now: float) -> bool:
        """Return whether the replicas that are ready at `now`, in seconds, have been for STEADY_S; also true where none is."""
        ready = frozenset(replica["id"] for replica in view["replicas"] if replica["state"] == "READY")
        if not self._ready or not self._ready <= ready:
            self._ready, self._since = ready, now
        return not ready or now - self._since >= STEADY_S


def wanted_agents(view: View) -> list[View]:
    """Return those on machines of their own that are there to stay; none if some are still missing."""
    staying = [one for one in view["load_balancers"] if one["state"] not in ("DRAINING", "TERMINATING")]
    return staying if len(staying) >= view["load_balancers_wanted"] else []


def why_failed(client: ControllerClient, name: str, version: int) -> str:
    """Return what the last replica of the version that could not live said, and where its log is."""
    (view,) = [each for each in client.services(name, ended=True) if each["name"] == name]
    ended = [r for r in view["replicas"] if r["version"] == version and r["end_reason"] is not None]
    if not ended:
        return view["notes"] or "no replica was launched"
    telling = [r for r in ended if r["end_reason"] in _GIVES_UP] or ended
    last = max(telling, key=lambda replica: replica["id"])
    reason = exit_message(last["id"], last, last["end_reason"])
    if last["end_reason"] == "CONFIG":
        return reason  # nothing ever ran
    kept = f" (its end is kept in {last['kept_log']})" if last["kept_log"] else ""
    return f"{reason}\nwhole log: serve logs {name} {last['id']}{kept}"


def log_tail(client: ControllerClient, what: str, lines: int) -> list[str]:
    """Return the last lines of a log; none where no log is kept, or where it does not arrive in time."""
    kept: deque[bytes] = deque(maxlen=lines)
    started, offset = b"", 0
    while True:
        try:
            content, offset = client.log(what, offset=offset)
        except (RefusedError, *AWAY):
            return []
        if not content:
            break
        *whole, started = (started + content).split(b"\n")
        kept.extend(whole)
    if started:
        kept.append(started)
    return [line.decode(errors="replace") for line in kept]


@contextmanager
def _live(client: ControllerClient) -> Iterator[Callable[[list[View], float], None]]:
    """On a terminal, the table of replicas below the event log, and below each that starts the last line of its log.

    Elsewhere nothing moves.
    """
    if not sys.stderr.isatty():
        yield lambda views, now: None
        return
    stop, last_lines = threading.Event(), LastLines(lambda log, offset: client.log(log, offset=offset))
    threading.Thread(target=last_lines.run, args=(stop,), daemon=True).start()
    with Live(console=console(sys.stderr), transient=True, auto_refresh=False) as live:

        def show(views: list[View], now: float) -> None:
            last_lines.follow(_log_of(view, r) for view in views for r in live_replicas(view) if _starts(r))
            live.update(progress_table(views, now, last_lines.line), refresh=True)

        try:
            yield show
        finally:
            stop.set()


def progress_table(views: Iterable[View], now: float, last_line: Callable[[str], str]) -> FittedTable:
    """Return the live replicas; below each that starts, the last line of its log."""
    shown = [(view, r) for view in views for r in live_replicas(view)]
    rows = [
        (f"{view['name']}/{r['id']}", r["state"], place(r), r["capacity_type"], span(now - r["since"]))
        for view, r in shown
    ]
    lines = {index: last_line(_log_of(view, r)) for index, (view, r) in enumerate(shown) if _starts(r)}
    columns = ("REPLICA", "STATE", "ZONE", "CAPACITY", "SINCE")
    below = {index: line for index, line in lines.items() if line}
    return FittedTable(columns, rows, drop=("CAPACITY", "ZONE"), folds=False, below=below)


def _starts(replica: View) -> bool:
    return bool(replica["state"] == "STARTING")


def _log_of(view: View, replica: View) -> str:
    return f"replica/{view['name']}/{replica['id']}"
