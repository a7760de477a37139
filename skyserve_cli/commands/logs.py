"""`serve logs`: what a replica, the load balancer or the controller printed, byte for byte."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Annotated

import typer

from skyserve_cli.commands import progress
from skyserve_cli.commands.options import View, complete_service, controller, find, home
from skyserve_cli.controller.client import Client, ControllerDownError
from skyserve_cli.output import WrongUsage, say

POLL_S = 0.3


def logs(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The service.", autocompletion=complete_service)
    ] = None,
    replica: Annotated[int | None, typer.Argument(metavar="[REPLICA]", help="The id of a replica.")] = None,
    replica_id: Annotated[int | None, typer.Option("--replica-id", metavar="N", help="The same.")] = None,
    node: Annotated[
        int, typer.Option("--node", metavar="RANK", min=0, help="Which machine of a replica of several.")
    ] = 0,
    of_controller: Annotated[bool, typer.Option("--controller", help="The controller's log.")] = False,
    of_load_balancer: Annotated[
        bool, typer.Option("--load-balancer", help="The load balancer's log.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on until the replica ends or Ctrl-C.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", metavar="N", min=0, help="Only the last N lines.")
    ] = None,
) -> None:
    """Print the log of a replica, of the load balancer, or of the controller."""
    wanted = replica if replica_id is None else replica_id
    if of_controller and (of_load_balancer or wanted is not None):
        raise WrongUsage("choose one: a replica, --load-balancer or --controller")
    if name is None and not of_controller:
        raise WrongUsage("name a service, or pass --controller")
    client = controller()
    if of_controller:
        what = "controller"
        if _controller_is_down(client):
            _print_file(tail)
            return
    else:
        assert name is not None  # noqa: S101 - seen to above
        view = find(client.services(down=True), name)
        if of_load_balancer:
            what = _load_balancer(view, wanted)
        else:
            what = f"replica/{name}/{_replica(client, name, wanted)}/{node}"
    with suppress(KeyboardInterrupt):
        _print(client, what, follow=follow, tail=tail)


def _controller_is_down(client: Client) -> bool:
    try:
        client.health()
    except ControllerDownError:
        return True
    return False


def _print_file(tail: int | None) -> None:
    """A controller that is not running is the one whose log is wanted most."""
    path = home().controller_log
    if not path.exists():
        raise WrongUsage(f"no controller ever ran here: there is no {path}")
    say(f"the controller is not running; from {path}:")
    content = path.read_bytes()
    _write(content if tail is None else _last_lines(content, tail))


def _replica(client: Client, name: str, wanted: int | None) -> int:
    """The one asked for, or the only one there is. Raises WrongUsage."""
    if wanted is not None:
        return wanted
    view = find(client.services(down=True), name)
    live = [replica["id"] for replica in progress.live_replicas(view)]
    if len(live) == 1:
        return int(live[0])
    known = (
        f"live: {', '.join(map(str, live))}"
        if live
        else "none is alive; `serve status --all` lists the ended"
    )
    raise WrongUsage(f"which replica of {name}? serve logs {name} N ({known})")


def _load_balancer(view: View, wanted: int | None) -> str:
    """The one beside the controller, or one on a machine of its own: by id, or the only one. Raises WrongUsage."""
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


def _print(client: Client, what: str, *, follow: bool, tail: int | None) -> None:
    offset, held = 0, b""
    while True:  # what there is
        content, offset = client.log(what, offset=offset)
        if not content:
            break
        if tail is None:
            _write(content)
        else:
            held = _last_lines(held + content, tail)
    _write(held)
    while follow:  # what comes
        ended = _has_ended(client, what)
        content, offset = client.log(what, offset=offset)
        _write(content)
        if not content:
            if ended:
                return
            time.sleep(POLL_S)


def _has_ended(client: Client, what: str) -> bool:
    kind, _, rest = what.partition("/")
    if kind == "controller":
        return False
    name, *ids = rest.split("/")
    view = next((view for view in client.services() if view["name"] == name), None)
    if view is None or kind == "load_balancer":
        return view is None
    live = (*progress.live_replicas(view), *view["load_balancers"])
    return all(replica["id"] != int(ids[0]) for replica in live)


def _last_lines(content: bytes, count: int) -> bytes:
    """The last `count` lines, a begun one included."""
    return b"".join(content.splitlines(keepends=True)[-count:]) if count else b""


def _write(content: bytes) -> None:
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()
