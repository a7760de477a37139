"""`serve logs`: what a replica, the load balancer or the controller printed, byte for byte."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Annotated

import typer

from skyserve_cli.commands import sentences
from skyserve_cli.commands.durations import instant
from skyserve_cli.commands.log_streams import Growing
from skyserve_cli.commands.options import View, complete_service, controller, find, home
from skyserve_cli.controller.api.client import ControllerClient, ControllerDownError, RefusedError
from skyserve_cli.controller.api.waiting import DeadlineError
from skyserve_cli.controller.reconcile.clock import SystemClock
from skyserve_cli.output import CommandFailed, WrongUsage, inform

POLL_S = 0.3
RESPONDS_WITHIN_S = 2.0  # a controller from memory


def logs(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The service.", autocompletion=complete_service)
    ] = None,
    replica: Annotated[int | None, typer.Argument(metavar="[REPLICA]", help="The id of a replica.")] = None,
    replica_id: Annotated[
        int | None, typer.Option("--replica-id", metavar="N", help="The same as the argument REPLICA.")
    ] = None,
    node: Annotated[
        int, typer.Option("--node", metavar="RANK", min=0, help="Which machine of a replica of several.")
    ] = 0,
    of_controller: Annotated[bool, typer.Option("--controller", help="The controller's log.")] = False,
    of_load_balancer: Annotated[
        bool, typer.Option("--load-balancer", help="The load balancer's log.")
    ] = False,
    previous: Annotated[
        bool, typer.Option("-p", "--previous", help="The log of the replica that failed last.")
    ] = False,
    follow: Annotated[
        bool | None,
        typer.Option(
            "--follow/--no-follow",
            "-f",
            show_default=False,
            help="Go on until the replica ends or Ctrl-C. Default: for all replicas of a service, on a terminal.",
        ),
    ] = None,
    tail: Annotated[
        int | None,
        typer.Option("--tail", metavar="N", min=0, help="Only the last N lines (of each replica)."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="WHEN",
            help="Only lines of the last 10m, say, or since 14:05 or 2026-11-23T14:05; of replicas.",
        ),
    ] = None,
) -> None:
    """Print the logs of replicas, of the load balancer, or of the controller.

    Without the id of a replica: the logs of all live replicas, each line behind the id of its replica.
    On a terminal, it follows them, and those that start later.

    \b
    serve logs chat
    serve logs chat 3 --tail 100 -f
    serve logs chat --since 10m
    serve logs chat --previous
    """
    wanted = replica if replica_id is None else replica_id
    if previous and (of_controller or of_load_balancer or wanted is not None or follow):
        raise WrongUsage(
            "--previous chooses the replica, and its log does not grow: pass only a service with it"
        )
    if of_controller and (of_load_balancer or wanted is not None):
        raise WrongUsage("choose one: a replica, --load-balancer or --controller")
    if name is None and not of_controller:
        raise WrongUsage("name a service, or pass --controller")
    begin = None if since is None else instant("--since", since, SystemClock().now())
    if since is not None and of_controller:
        raise WrongUsage("--since is for logs of replicas; the lines of the controller's log have their time")
    client = controller()
    if of_controller:
        what = "controller"
        if why := _why_silent(client):
            _print_file(why, tail)
            return
    else:
        assert name is not None  # noqa: S101 - seen to above
        view = find(client.services(name, down=True), name)
        if of_load_balancer:
            what = _load_balancer(view, wanted)
            if since is not None and not what.startswith("replica/"):
                raise WrongUsage("--since is for logs on machines of their own; this load balancer has none")
        elif previous:
            what = f"replica/{name}/{_previous(client, name)}/{node}"
        elif wanted is None:
            with suppress(KeyboardInterrupt):
                _print_all(
                    client,
                    view,
                    node,
                    follow=sys.stdout.isatty() if follow is None else follow,
                    tail=tail,
                    since=begin,
                )
            return
        else:
            what = f"replica/{name}/{wanted}/{node}"
    with suppress(KeyboardInterrupt):
        _print(client, what, follow=bool(follow), tail=tail, since=begin)


def _why_silent(client: ControllerClient) -> str:
    """Return why the controller does not send its log; empty if it does. Raises UnreachableError of one elsewhere."""
    try:
        with client.waiting.within(RESPONDS_WITHIN_S, RESPONDS_WITHIN_S):
            client.activity()
    except RefusedError:
        return ""
    except ControllerDownError:
        return sentences.CONTROLLER_DOWN
    except DeadlineError as error:
        if "://" in client.where:
            raise
        return str(error)
    return ""


def _print_file(why: str, tail: int | None) -> None:
    """A controller that is not running is the one whose log is wanted most."""
    path = home().controller_log
    if not path.exists():
        raise WrongUsage(f"no controller ever ran here: there is no {path}")
    inform(f"{why}; from {path}:")
    content = path.read_bytes()
    _write(content if tail is None else _last_lines(content, tail))


def _previous(client: ControllerClient, name: str) -> int:
    """Return the replica that terminated last and left a log. Raises CommandFailed."""
    view = find(client.services(name, down=True, ended=True), name)
    ended = [replica for replica in view["replicas"] if replica["ended_at"] and replica["kept_log"]]
    if not ended:
        raise CommandFailed(f"no replica of {name} failed in the last hour and left a log")
    last = max(ended, key=lambda replica: (replica["ended_at"], replica["id"]))
    inform(sentences.exit_message(last["id"], last, last["end_reason"]))
    return int(last["id"])


def _print_all(
    client: ControllerClient, view: View, node: int, *, follow: bool, tail: int | None, since: float | None
) -> None:
    """The logs of all live replicas, each line behind the id of its replica. Raises CommandFailed."""
    name = view["name"]
    growing = Growing(lambda log, offset: client.log(log, offset=offset, since=since), name, node)
    if not sentences.live_replicas(view):
        raise CommandFailed(
            f"{name} has no live replica; `serve logs {name} --previous` prints the log of the last that failed"
        )
    _write(b"".join(growing.step(_ids(view), tail=tail)))
    said: set[str] = set()
    while follow:
        for sentence in sorted(set(growing.unread.values()) - said):
            inform(sentence)
            said.add(sentence)
        up = [each for each in client.services(name) if each["name"] == name]
        lines = growing.step(_ids(up[0]) if up else ())
        _write(b"".join(lines))
        if not up:
            return
        if not lines:
            time.sleep(POLL_S)
    _write(b"".join(growing.finish()))
    if growing.unread:
        raise CommandFailed("\n".join(growing.unread.values()))


def _ids(view: View) -> list[int]:
    return [int(replica["id"]) for replica in sentences.live_replicas(view)]


def _load_balancer(view: View, wanted: int | None) -> str:
    """Return the one beside the controller, or one on a machine of its own: by id, or the only one. Raises WrongUsage."""
    agents = [agent["id"] for agent in view["load_balancers"]]
    if wanted is None and len(agents) == 1:
        wanted = agents[0]
    if wanted in agents:
        return f"replica/{view['name']}/{wanted}/0"
    if wanted is None and not agents:
        return f"load_balancer/{view['name']}"
    known = f"there are {', '.join(map(str, agents))}" if agents else "it has one, beside the controller"
    raise WrongUsage(
        f"which load balancer of {view['name']}? serve logs {view['name']} N --load-balancer ({known})"
    )


def _print(
    client: ControllerClient, what: str, *, follow: bool, tail: int | None, since: float | None
) -> None:
    offset, held = 0, b""
    while True:  # what there is
        content, offset = client.log(what, offset=offset, since=since)
        if not content:
            break
        if tail is None:
            _write(content)
        else:
            held = _last_lines(held + content, tail)
    _write(held)
    while follow:  # what comes
        ended = _has_ended(client, what)
        content, offset = client.log(what, offset=offset, since=since)
        _write(content)
        if not content:
            if ended:
                return
            time.sleep(POLL_S)


def _has_ended(client: ControllerClient, what: str) -> bool:
    kind, _, rest = what.partition("/")
    if kind == "controller":
        return False
    name, *ids = rest.split("/")
    view = next((view for view in client.services(name) if view["name"] == name), None)
    if view is None or kind == "load_balancer":
        return view is None
    live = (*sentences.live_replicas(view), *view["load_balancers"])
    return all(replica["id"] != int(ids[0]) for replica in live)


def _last_lines(content: bytes, count: int) -> bytes:
    """Return the last `count` lines, a started one included."""
    return b"".join(content.splitlines(keepends=True)[-count:]) if count else b""


def _write(content: bytes) -> None:
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()
