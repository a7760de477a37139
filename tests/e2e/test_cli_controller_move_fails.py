"""A move that fails, or is killed: there are never two controllers, and always a way to go on."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyserve_cli.home import is_held
from tests.clouds.schedules import only_long
from tests.e2e.conftest import ROOT, Serve, elsewhere
from tests.integration import sshd as sshd_module
from tests.integration.sshd import Sshd

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sshd_module.why_not() is not None, reason=str(sshd_module.why_not())),
]

SERVICE = (
    "name: chat\nservice: {readiness_probe: /, replicas: 0}\nresources: {infra: local}\nrun: 'sleep 1000'\n"
)


@pytest.fixture
def far(serve: Serve, tmp_path: Path) -> Iterator[Serve]:
    """The home on the other host. Afterwards the services are down, wherever they are."""
    far = Serve(tmp_path / "far")
    yield far
    serve("context", "use", "local")
    if (far.home / "state.db").exists():  # with a load balancer, if a controller ran there
        far("controller", "start", "--force")
        far("down", "--all", "--purge", "-y", "--timeout", "60")
    far("controller", "stop")
    (serve.home / "moved.json").unlink(missing_ok=True)
    assert far.processes() == []


def words(sshd: Sshd, far: Serve, tmp_path: Path) -> list[str]:
    return [*elsewhere(sshd, far.home, tmp_path / "serve"), "--move-endpoints", "-y"]


def runs(serve: Serve) -> bool:
    return is_held(serve.home / "controller.lock") and (serve.home / "controller.sock").exists()


def knows_chat(serve: Serve) -> bool:
    shown = serve("status", "-o", "json", env={"SKYSERVE_CONTROLLER": ""})
    return shown.code == 0 and [one["name"] for one in shown.json()] == ["chat"]


def bring_up(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "chat.yaml").write_text(SERVICE)
    serve.ok("up", tmp_path / "chat.yaml", "-y", "--no-wait")


#: Up to when the command is left alone, in the order in which it comes to be.
MOMENTS: dict[str, Callable[[Serve, Serve], bool]] = {
    "the other home is marked": lambda here, there: (there.home / "incoming.json").exists(),
    "the controller here has stopped": lambda here, there: not runs(here),
    "the state is sent": lambda here, there: (there.home / ".moving.backup").exists(),
    "the state is restored": lambda here, there: (there.home / "state.db").exists(),
    "it is decided": lambda here, there: (here.home / "moved.json").exists(),
    "the mark there is gone": lambda here, there: (
        (here.home / "moved.json").exists() and not (there.home / "incoming.json").exists()
    ),
    "the controller there runs": lambda here, there: runs(there),
}
IN_EVERY_RUN = ("it is decided",)


@pytest.mark.parametrize(
    "moment",
    [pytest.param(name, marks=() if name in IN_EVERY_RUN else only_long) for name in MOMENTS],
)
def test_a_move_that_is_killed_is_completed_by_the_same_command(
    serve: Serve, far: Serve, sshd: Sshd, tmp_path: Path, moment: str
) -> None:
    bring_up(serve, tmp_path)
    command = [*serve.command, "controller", "move", *words(sshd, far, tmp_path)]
    with subprocess.Popen(
        command, env=serve.environment, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as move:
        while not MOMENTS[moment](serve, far):
            assert move.poll() is None, "it was too fast"
            time.sleep(0.001)
        move.kill()
    time.sleep(1.0)  # what it has started there goes on
    assert not (runs(serve) and runs(far))
    if (serve.home / "moved.json").exists():
        refused = serve("controller", "start")
        assert (refused.code, "completes a move that was interrupted" in refused.err) == (2, True)
    elif not runs(serve):
        refused = far("controller", "start")
        assert (refused.code, "is being filled by `serve controller move`" in refused.err) == (2, True)
        serve.ok("controller", "start")
        assert knows_chat(serve)
    serve.ok("controller", "move", *words(sshd, far, tmp_path))
    assert (runs(serve), runs(far)) == (False, True)
    assert knows_chat(far)
    assert [one["name"] for one in serve.ok("status", "-o", "json").json()] == ["chat"], "through the context"


def broken(tmp_path: Path, verb: str, error: str) -> list[str]:
    """Options for a program there whose `serve controller VERB` fails."""
    path = tmp_path / "broken"
    fails = f'[ "$2" = {verb} ] && {{ echo "{error}" >&2; exit 1; }}\nexec'
    path.write_text((tmp_path / "serve").read_text().replace("exec", fails))
    path.chmod(0o755)
    return ["--serve", str(path)]


@only_long
def test_after_an_error_before_the_decision_the_controller_here_goes_on(
    serve: Serve, far: Serve, sshd: Sshd, tmp_path: Path
) -> None:
    bring_up(serve, tmp_path)
    options = words(sshd, far, tmp_path)
    failed = serve("controller", "move", *options, *broken(tmp_path, "restore", "no space"))
    assert failed.code == 1
    assert "`serve controller restore` failed: no space; nothing was moved" in failed.err
    assert (runs(serve), knows_chat(serve)) == (True, True)


def test_after_an_error_there_the_controller_here_goes_on_and_a_move_can_be_undone(
    serve: Serve, far: Serve, sshd: Sshd, tmp_path: Path
) -> None:
    bring_up(serve, tmp_path)
    options = words(sshd, far, tmp_path)
    failed = serve("controller", "move", *options, *broken(tmp_path, "start", "no memory"))
    assert failed.code == 1
    assert "no memory; the controller was stopped there and runs here again" in failed.err
    assert (runs(serve), runs(far), knows_chat(serve)) == (True, False, True)
    assert not (serve.home / "moved.json").exists()

    serve.ok("controller", "move", *options)
    far.ok("controller", "stop")
    undone = serve.ok("controller", "start", "--force")
    assert "there must be only one" in undone.err
    serve.ok("context", "use", "local")
    assert knows_chat(serve)


def test_an_error_after_the_start_there_leaves_no_load_balancer_there(
    serve: Serve, far: Serve, sshd: Sshd, tmp_path: Path
) -> None:
    bring_up(serve, tmp_path)
    serve.eventually(lambda: serve.view("chat")["load_balancer"]["synced"])  # it listens
    agent = json.loads((serve.home / "lb" / "chat" / "agent.json").read_text())
    path, listens = tmp_path / "broken", far.home / "lb" / "chat" / "agent.json"
    path.write_text(
        f'#!/bin/sh\n[ "$2" = start ] || exec "{tmp_path / "serve"}" "$@"\n"{tmp_path / "serve"}" "$@"\n'
        f"kill {agent['pid']}  # another host would have the port\n"
        f"while [ ! -s {listens} ]; do sleep 0.1; done\necho 'no memory' >&2\nexit 1\n"
    )
    path.chmod(0o755)
    failed = serve("controller", "move", *words(sshd, far, tmp_path), "--serve", str(path))
    assert failed.code == 1
    assert "no memory; the controller was stopped there and runs here again" in failed.err
    assert listens.exists()  # there was one
    far.eventually(lambda: not far.processes())
    assert (runs(serve), knows_chat(serve)) == (True, True)


def test_a_home_that_was_moved_names_the_other_host(
    serve: Serve, far: Serve, sshd: Sshd, tmp_path: Path
) -> None:
    bring_up(serve, tmp_path)
    serve.ok("controller", "move", *words(sshd, far, tmp_path))
    serve.ok("context", "use", "local")
    for command in (["status"], ["controller", "status"], ["events"]):
        refused = serve(*command)
        assert refused.code == 1
        assert f"the controller of {serve.home} was moved to ssh/" in refused.err
        assert "call it with `serve context use" in refused.err


def test_what_cannot_be_moved_is_named(serve: Serve, far: Serve, sshd: Sshd, tmp_path: Path) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(SERVICE.replace("replicas: 0", "replicas: 1"))
    serve.ok("up", file, "-y", "--no-wait")
    serve.eventually(lambda: serve.view("chat")["replicas"])
    options = words(sshd, far, tmp_path)
    refused = serve("controller", "move", *options)
    assert (refused.code, "chat: replicas on the local cloud (1)" in refused.err) == (2, True), refused.err
    file.write_text(SERVICE)
    serve.ok("update", "chat", file, "-y", "--no-wait")
    serve.eventually(lambda: not serve.view("chat")["replicas"])
    refused = serve("controller", "move", *[one for one in options if one != "--move-endpoints"])
    assert (refused.code, "chat: its load balancer runs beside the controller" in refused.err) == (2, True)
    assert runs(serve)
    assert not (far.home / "state.db").exists()
