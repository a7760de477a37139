"""Two people with tokens and a controller on a port with a certificate, by the program as they run it."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from tests.e2e.conftest import Serve
from tests.integration.lb_harness import self_signed

SERVICE = "name: {name}\nservice: {{readiness_probe: /, replicas: 0}}\nresources: {{infra: local}}\nrun: 'sleep 1000'\n"


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_people_with_roles_share_a_controller(serve: Serve, tmp_path: Path, port: int) -> None:
    certfile, keyfile = self_signed(tmp_path)
    serve.home.mkdir(parents=True, exist_ok=True)
    (serve.home / "config.yaml").write_text(
        f"controller: {{listen: {{port: {port}, certfile: {certfile}, keyfile: {keyfile}}}}}\n"
    )
    for name in ("chat", "other"):
        (tmp_path / f"{name}.yaml").write_text(SERVICE.format(name=name))
        assert serve("up", tmp_path / f"{name}.yaml", "-y", "--no-wait").code == 0
    tokens = {}
    for name, role in (("ada", "operator"), ("vic", "viewer")):
        made = serve("token", "create", name, "--role", role, "--service", "chat", "-o", "json")
        assert made.code == 0, made.err
        tokens[name] = made.json()["token"]
        assert serve("token", "create", name).code == 1

    ada, vic = Serve(tmp_path / "ada"), Serve(tmp_path / "vic")
    for name, person in (("ada", ada), ("vic", vic)):
        file = tmp_path / f"{name}.token"
        file.write_text(tokens[name] + "\n")
        url = f"https://127.0.0.1:{port}"
        done = person("context", "add", "prod", url, "--token-file", file, "--ca", certfile)
        assert done.code == 0, done.err
        assert person("context", "use", "prod").code == 0
        assert stat.S_IMODE((person.home / "contexts.json").stat().st_mode) == 0o600
        shown = person("status", "-o", "json")
        assert [one["name"] for one in shown.json()] == ["chat"], shown.err

    refused = vic("down", "chat", "-y")
    assert refused.code == 1
    assert "the token vic has the role viewer; this needs the role operator" in refused.err
    refused = ada("up", tmp_path / "other.yaml", "-y")
    assert refused.code == 1
    assert "the token ada does not cover the service other" in refused.err
    assert ada("controller", "status").code == 0
    assert ada("down", "chat", "-y").code == 0
    assert "down (by ada)" in serve("events", "chat").out

    assert serve("token", "revoke", "ada").code == 0
    refused = ada("status")
    assert refused.code == 1
    assert "the token is missing, wrong or revoked" in refused.err
    rows = {one["name"]: one for one in serve("token", "list", "-o", "json").json()}
    assert (rows["ada"]["revoked_at"] is None, rows["vic"]["revoked_at"] is None) == (False, True)
    assert rows["ada"]["services"] == ["chat"]
    for path in serve.home.rglob("*"):
        if path.is_file():
            assert not any(token.encode() in path.read_bytes() for token in tokens.values()), path


def test_a_context_says_what_is_wrong_with_it(serve: Serve, tmp_path: Path, port: int) -> None:
    file = tmp_path / "token"
    file.write_text("sks_x\n")
    for url, word in (
        ("http://prod.example:9000", "http:// would send the token in clear"),
        ("prod.example", "is no address like https://HOST:PORT"),
        ("https://me@prod.example", "is no address like https://HOST:PORT"),
    ):
        refused = serve("context", "add", "prod", url, "--token-file", file)
        assert (refused.code, word in refused.err) == (2, True), refused.err
    assert serve("context", "use", "prod").code == 2
    assert serve("context", "add", "prod", f"http://127.0.0.1:{port}", "--token-file", file).code == 0
    assert serve("context", "use", "prod").code == 0
    refused = serve("status")
    assert refused.code == 1
    assert f"the controller at http://127.0.0.1:{port} does not respond" in refused.err
    assert not (serve.home / "controller.sock").exists()
    listed = serve("context", "list", "-o", "json").json()
    assert [(one["name"], one["current"]) for one in listed] == [("local", False), ("prod", True)]
    assert serve("context", "remove", "prod").code == 0
    assert serve("context", "use", "local").code == 0
    refused = serve("status", env={"SKYSERVE_CONTROLLER": "https://127.0.0.1:1"})
    assert (refused.code, "a token is missing" in refused.err) == (2, True), refused.err


@pytest.mark.long
def test_a_team_has_a_quota(serve: Serve, tmp_path: Path) -> None:
    serve.home.mkdir(parents=True, exist_ok=True)
    (serve.home / "config.yaml").write_text("teams: {research: {max_replicas: 2}}\n")
    file = tmp_path / "chat.yaml"
    file.write_text(SERVICE.format(name="chat").replace("replicas: 0", "replicas: 3"))
    refused = serve("up", file, "-y", "--team", "research")
    assert refused.code == 1, refused.err
    assert (
        "the least size of chat, 3 replicas, exceeds the quota of the team research (max_replicas: 3 of 2)"
        in refused.err
    )
    refused = serve("up", file, "-y", "--team", "nobody")
    assert (refused.code, "there is no team nobody in config.yaml (teams: research)" in refused.err) == (
        1,
        True,
    )

    flexible = "replica_policy: {min_replicas: 2, num_overprovision: 2}"
    file.write_text(SERVICE.format(name="chat").replace("replicas: 0", flexible))
    assert serve("up", file, "-y", "--team", "research", "--no-wait").code == 0
    serve.eventually(lambda: serve("teams", "-o", "json").json()[0]["waiting"] == ["chat"])
    (team,) = serve("teams", "-o", "json").json()
    assert (team["name"], team["used"]["replicas"], team["services"]) == ("research", 2, ["chat"])
    assert "2/2" in serve("teams").out
    note = "2 replicas are not launched for the quota of the team research (max_replicas, 2): 2 in use"
    assert note in serve("status").out
    assert note in serve("events", "chat").out
    assert serve("token", "create", "ada", "--team", "sales").code == 1
    assert serve("token", "create", "ada", "--team", "research").code == 0
    assert serve("token", "list", "-o", "json").json()[0]["team"] == "research"
    assert serve("down", "chat", "-y", "--purge").code == 0


@pytest.mark.long
def test_a_certificate_that_is_not_there_is_named(serve: Serve, tmp_path: Path, port: int) -> None:
    serve.home.mkdir(parents=True, exist_ok=True)
    files = f"certfile: {tmp_path}/cert.pem, keyfile: {tmp_path}/key.pem"
    (serve.home / "config.yaml").write_text(f"controller: {{listen: {{port: {port}, {files}}}}}\n")
    started = serve("controller", "start")
    assert started.code == 2
    assert (
        f"controller.listen.certfile: {tmp_path}/cert.pem and {tmp_path}/key.pem cannot be read: No such file"
        in started.err
    )
    (serve.home / "config.yaml").unlink()
    assert serve("controller", "start").code == 0
