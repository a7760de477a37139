"""`serve down`: terminates services, or one replica, and waits until they have really gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Annotated

import typer

from policies.service_state import CLEANUP_TIMEOUT_S
from skyserve_cli.commands import progress, sentences
from skyserve_cli.commands.confirmation import confirm
from skyserve_cli.commands.options import (
    NoWait,
    Timeout,
    View,
    Yes,
    complete_service,
    controller,
    find,
    no_such_service,
    only_name,
)
from skyserve_cli.commands.sentences import NO_SERVICE
from skyserve_cli.controller.api.client import AWAY, ControllerClient
from skyserve_cli.controller.api.waiting import DeadlineError
from skyserve_cli.controller.reconcile.clock import SystemClock
from skyserve_cli.output import CommandFailed, WrongUsage, inform, place, plural

SHORTEST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 5.0  # to list every region of a cloud costs many calls
PATIENCE_S = 1800.0  # longer than any drain and any clean-up: leftovers then will not go by themselves


def down(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="Names or patterns ('llama-*').", autocompletion=complete_service
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("-a", "--all", help="Every service.")] = False,
    replica_id: Annotated[
        int | None,
        typer.Option("--replica-id", metavar="N", help="One replica only; another takes its place."),
    ] = None,
    purge: Annotated[
        bool,
        typer.Option(
            "-p", "--purge", help="Do not wait for requests to finish; remove `cache` of own hosts."
        ),
    ] = False,
    yes: Yes = False,
    no_wait: NoWait = False,
    timeout: Timeout = PATIENCE_S,
) -> None:
    """Take services down, and wait until nothing of them is left.

    Nothing: the clouds list no instance and no disk of theirs any more, and with the last service of a cloud its groups,
    keys and networks are removed, too. What cannot be removed is named, with exit code 1.
    """
    if everything == bool(names):
        raise WrongUsage("name the services to take down, or pass --all")
    if replica_id is not None and (everything or len(names or ()) != 1 or purge):
        raise WrongUsage("--replica-id goes with the name of one service, and nothing else")
    client = controller()
    services = client.services(only_name(names or []))
    if replica_id is not None:
        view = find(services, (names or [""])[0])
        _end_replica(client, view, replica_id, yes=yes, no_wait=no_wait, timeout_s=timeout)
        return

    chosen = _chosen(services, names or [], everything)
    if not chosen:
        inform(NO_SERVICE)
        return
    replicas = sum(len(sentences.live_replicas(view)) for view in services if view["name"] in chosen)
    confirm(f"Take down {', '.join(chosen)} with {plural(replicas, 'replica')}?", yes=yes)
    seen = progress.last_event(client)
    for index, name in enumerate(chosen):
        try:
            client.down(name, purge=purge)
        except DeadlineError as error:
            before = f"{', '.join(chosen[:index])} goes down; " if index else ""
            raise DeadlineError(f"{before}{name}: {error}") from None
    if no_wait:
        inform(f"going down: {', '.join(chosen)}")
        return
    began = SystemClock().now()
    _wait(client, frozenset(chosen), seen, timeout)
    left_s = None if timeout is None else max(0.0, timeout - (SystemClock().now() - began))
    tidy(client, chosen, left_s, inform)
    inform(f"down: {', '.join(chosen)}")


def _chosen(services: Sequence[View], patterns: Sequence[str], everything: bool) -> list[str]:
    """Raise CommandFailed for a name or pattern that fits none."""
    known = [view["name"] for view in services]
    if everything:
        return known
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise no_such_service(pattern, known)
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _end_replica(
    client: ControllerClient,
    view: View,
    replica_id: int,
    *,
    yes: bool,
    no_wait: bool,
    timeout_s: float | None,
) -> None:
    name = view["name"]
    confirm(f"End replica {replica_id} of {name}?", yes=yes)
    seen = progress.last_event(client)
    client.kill(name, replica_id)
    if no_wait:
        return

    def gone(views: dict[str, View]) -> bool:
        view = views[name]
        return all(one["id"] != replica_id for one in (*view["replicas"], *view["load_balancers"]))

    try:
        progress.follow(client, frozenset((name,)), after=seen, timeout_s=timeout_s, done=gone)
    except KeyboardInterrupt:
        raise CommandFailed(f"\nstopped waiting; replica {replica_id} of {name} still ends", 130) from None
    inform(f"replica {replica_id} of {name} has ended")


def _wait(client: ControllerClient, names: frozenset[str], seen: int, timeout_s: float | None) -> None:
    def gone(views: dict[str, View]) -> bool:
        gone = [is_gone(view) for view in views.values()]  # of all: each may say that it cannot be
        return all(gone)

    try:
        progress.follow(client, names, after=seen, timeout_s=timeout_s, done=gone)
    except KeyboardInterrupt:
        raise CommandFailed(
            f"\nstopped waiting; {', '.join(sorted(names))} goes down in the background. "
            "`serve status` lists the rest",
            130,
        ) from None


def tidy(
    client: ControllerClient,
    names: Sequence[str],
    timeout_s: float | None,
    inform: Callable[[str], None],
) -> None:
    """Wait until the clouds themselves list nothing of it any more: no instance, no disk.

    And where no service is left, no group, key or network of ours. Raises CommandFailed with a sentence for each thing that
    stays.
    """
    patience_s = CLEANUP_TIMEOUT_S if timeout_s is None else min(timeout_s, CLEANUP_TIMEOUT_S)
    clock = SystemClock()
    began, seen, pause_s = clock.now(), frozenset[str](), SHORTEST_PAUSE_S
    try:
        while True:
            step = _step(client, names)
            for thing in step["removed"]:
                inform(f"removed {thing}")
            waiting = step["waiting"]
            if not waiting or clock.now() - began > patience_s:
                break
            for sentence in frozenset(waiting) - seen:
                inform(f"waiting: {sentence}")
            seen |= frozenset(waiting)
            time.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 1.5 * pause_s)
    except KeyboardInterrupt:
        raise CommandFailed("\nstopped waiting; `serve gc` shows orphans in the clouds", 130) from None
    if left := [*waiting, *step["problems"]]:
        raise CommandFailed(
            f"{', '.join(names)}: down, but not everything is removed:\n"
            + "".join(f"  {sentence}\n" for sentence in left)
            + "the controller keeps trying; `serve gc` shows orphans, and removes them"
        )


def _step(client: ControllerClient, names: Sequence[str]) -> View:
    """It can be made again: a controller that fails in the middle is given time to come back."""
    clock = SystemClock()
    began = clock.now()
    while True:
        try:
            return client.tidy(names)
        except AWAY:
            if clock.now() - began > progress.AWAY_PATIENCE_S:
                raise
            time.sleep(progress.POLL_S)


def is_gone(view: View) -> bool:
    """Return whether no replica is left, nor the load balancer. Raises CommandFailed if some cannot be removed."""
    if view["status"] == "FAILED_CLEANUP":
        raise CommandFailed(_left_over(view))
    beside = view["load_balancer"]
    return view["status"] == "DOWN" and not view["load_balancers"] and not (beside and beside["alive"])


def _left_over(view: View) -> str:
    lines = [
        f"  replica {replica['id']} in {place(replica)}, instance {replica['instance_id'] or 'unknown'}"
        + (f": {replica['message']}" if replica["message"] else "")
        for replica in sentences.live_replicas(view)
    ]
    return (
        f"{view['name']} could not be deleted whole; the controller keeps trying. Still there:\n"
        + "\n".join(lines)
    )
