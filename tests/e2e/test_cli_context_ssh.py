"""A controller on another host, through a real sshd: the commands of a user with only a login there."""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Serve
from tests.integration import sshd as sshd_module
from tests.integration.sshd import Sshd

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sshd_module.why_not() is not None, reason=str(sshd_module.why_not())),
]

SERVICE = """
name: chat
service: {readiness_probe: /, replicas: 1}
resources: {infra: local}
run: echo started; exec python3 -m http.server $SKYSERVE_REPLICA_PORT
"""


@pytest.fixture
def person(serve: Serve, sshd: Sshd, tmp_path: Path) -> Serve:
    """The home of another user, whose commands call the controller of `serve` over SSH."""
    person = Serve(tmp_path / "person")
    person.ok("context", "add", "prod", sshd.url, "--home", serve.home, *keys_of(sshd))
    person.ok("context", "use", "prod")
    return person


def keys_of(sshd: Sshd) -> list[str]:
    return ["--identity", str(sshd.identity), "--known-hosts", str(sshd.known_hosts)]


def test_a_service_of_a_controller_on_another_host(serve: Serve, person: Serve, tmp_path: Path) -> None:
    down = person("status")
    assert (
        down.code,
        "is no home of a controller" in down.err or "no controller runs there" in down.err,
    ) == (1, True)
    serve.ok("controller", "start")
    file = tmp_path / "chat.yaml"
    file.write_text(SERVICE)
    endpoint = person.ok("up", file, "-y").out.strip()
    assert endpoint.startswith("http://")
    (view,) = person.ok("status", "-o", "json").json()
    assert (view["name"], view["ready"]) == ("chat", 1)
    assert "started" in person.ok("logs", "chat", "1", "--no-follow").out
    goals = [one for one in person.ok("events", "chat", "-o", "json").out.splitlines() if '"goal"' in one]
    assert goals
    assert all('"author": "owner"' in line or '"author":"owner"' in line for line in goals), goals

    # What the controller refuses is refused here in the same words.
    file.write_text(SERVICE.replace("infra: local", "infra: aws"))
    refused = person("update", "chat", file, "-y")
    assert (refused.code, "aws" in refused.err) == (1, True), refused.err

    token = (serve.home / "controller.token").read_text()
    assert not (person.home / "controller.token").exists()
    for path in person.home.rglob("*"):
        assert not path.is_file() or token not in path.read_text(errors="replace"), path


def test_the_workdir_is_sent_and_then_only_the_file_that_changed(
    serve: Serve, person: Serve, tmp_path: Path
) -> None:
    serve.ok("controller", "start")
    project = tmp_path / "project"
    (project / "sub").mkdir(parents=True)
    (project / "index.html").write_text("version one")
    (project / "sub" / "weights").write_bytes(os.urandom(9_000_000))
    (project / "left.log").write_text("x" * 1000)
    (project / ".skyignore").write_text("*.log\n")
    (tmp_path / "extra.json").write_text("{}")
    file = project / "chat.yaml"
    file.write_text(SERVICE + f"workdir: .\nfile_mounts: {{extra.json: {tmp_path / 'extra.json'}}}\n")
    size = sum(path.stat().st_size for path in project.rglob("*") if path.is_file() and path.suffix != ".log")

    dry = person.ok("up", file, "--dry-run", cwd=project)
    assert "sent" not in dry.err
    assert not (serve.home / "uploads").exists()
    made = person.ok("up", file, "-y", cwd=project)
    assert f"sent {size:,} bytes of {project}" in made.err, made.err
    assert "sent 2 bytes of" in made.err
    endpoint = made.out.strip()

    def page(name: str) -> str:
        with urllib.request.urlopen(f"{endpoint}/{name}", timeout=30) as response:
            return str(response.read().decode())

    assert (page("index.html"), page("extra.json")) == ("version one", "{}")
    with pytest.raises(urllib.error.HTTPError):
        page("left.log")

    same = person.ok("update", "chat", file, "-y", cwd=project)
    assert ("nothing changes" in same.err, "sent" in same.err) == (True, False), same.err
    (project / "index.html").write_text("version two!")
    changed = person.ok("update", "chat", file, "-y", cwd=project)
    assert "sent 12 bytes of" in changed.err, changed.err
    assert page("index.html") == "version two!"
    (project / "python").symlink_to("/usr/bin/python3")
    refused = person("update", "chat", file, "-y", cwd=project)
    assert (refused.code, "workdir/python is a link to /usr/bin/python3" in refused.err) == (1, True)
    trees = list((serve.home / "uploads" / "trees").glob("*.json"))
    assert len(trees) == 3


def test_a_command_that_follows_goes_on_after_a_lost_connection_and_a_killed_controller(
    serve: Serve, person: Serve, sshd: Sshd, tmp_path: Path
) -> None:
    serve.ok("controller", "start")
    file = tmp_path / "chat.yaml"
    file.write_text(SERVICE)
    with subprocess.Popen(
        [*person.command, "up", str(file), "-y"],
        env=person.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as up:
        serve.eventually(lambda: [one for one in services(serve) if one == "chat"])
        token = (serve.home / "controller.token").read_text()
        assert sessions(sshd) == 1, "one SSH connection for all calls of a command"
        assert all(token not in word for words in command_lines() for word in words)
        sshd.cut()
        os.kill(int(serve.ok("controller", "status", "-o", "json").json()["pid"]), signal.SIGKILL)
        out, err = up.communicate(timeout=60)
    assert (up.returncode, out.startswith(b"http://")) == (0, True), err


def services(serve: Serve) -> list[str]:
    return [one["name"] for one in serve.ok("status", "-o", "json").json()]


def sessions(sshd: Sshd) -> int:
    assert sshd.process is not None
    return len(psutil.Process(sshd.process.pid).children())


def command_lines() -> list[list[str]]:
    return [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]


def test_a_wrong_host_a_wrong_key_and_a_wrong_option_are_named(
    serve: Serve, sshd: Sshd, tmp_path: Path
) -> None:
    serve.home.mkdir(exist_ok=True)

    def said(*options: object) -> str:
        serve.ok("context", "add", "prod", sshd.url, *map(str, options))
        serve.ok("context", "use", "prod")
        done = serve("status")
        assert done.code == 1
        assert done.err.count("\n") == 1, done.err
        assert f"the controller at {sshd.url} does not respond: " in done.err
        return done.err

    stranger = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", stranger], check=True)
    (tmp_path / "empty").write_text("")
    assert "refuses the login" in said("--identity", stranger, "--known-hosts", sshd.known_hosts)
    assert "no host key is known" in said("--identity", sshd.identity, "--known-hosts", tmp_path / "empty")
    kind, key, *_ = stranger.with_suffix(".pub").read_text().split()
    (tmp_path / "other").write_text(f"[127.0.0.1]:{sshd.port} {kind} {key}\n")
    assert "another host key" in said("--identity", sshd.identity, "--known-hosts", tmp_path / "other")
    missing = said(*keys_of(sshd), "--home", tmp_path / "none")
    assert f"{tmp_path / 'none'} is no home of a controller" in missing
    sshd.stop()
    assert "cannot be reached" in said(*keys_of(sshd))

    for options, word in (
        (["ssh://h", "--token-file", sshd.identity], "--token-file: is for https:// and not for ssh://"),
        (["https://h", "--home", "x"], "--home: is for ssh:// and not for https://"),
        (["https://h"], "--token-file: name the file with the token"),
        (["ssh://me@h/path"], "is no address like ssh://USER@HOST:PORT"),
        (["ssh://me@h", "--identity", tmp_path / "nothing"], "--identity: there is no file"),
    ):
        refused = serve("context", "add", "other", *map(str, options))
        assert (refused.code, word in refused.err) == (2, True), refused.err
    assert [one["name"] for one in serve("context", "list", "-o", "json").json()] == ["local", "prod"]
