"""A controller that is deployed to another host, over a real sshd. Nothing is downloaded: `--serve` names this checkout."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import Serve, elsewhere
from tests.integration import sshd as sshd_module
from tests.integration.sshd import Sshd

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sshd_module.why_not() is not None, reason=str(sshd_module.why_not())),
]


@pytest.fixture
def far(serve: Serve, tmp_path: Path) -> Iterator[Serve]:
    """The home on the other host, to look at it and to stop what runs there."""
    far = Serve(tmp_path / "far")
    yield far
    if far.home.exists():
        far("controller", "stop")
    assert far.processes() == []


def test_deployed_once_and_again_and_after_it_was_killed(
    serve: Serve, far: Serve, sshd: Sshd, tmp_path: Path
) -> None:
    serve.configure(notify=[{"name": "us", "webhook_file": str(tmp_path / "hook")}])
    (tmp_path / "hook").write_text("http://127.0.0.1:9/very-secret\n")
    words = elsewhere(sshd, far.home, tmp_path / "serve")
    first = serve.ok("controller", "deploy", *words, "-o", "json").json()
    assert (first["started"], first["kept_by"], first["context"]) == (True, "keeper", "prod")
    assert (far.home / "config.yaml").read_text() == (serve.home / "config.yaml").read_text()
    assert (far.home / "config.yaml").stat().st_mode & 0o077 == 0
    serve.ok("context", "use", "prod")
    assert serve.ok("controller", "status", "-o", "json").json()["pid"] == first["pid"]

    again = serve.ok("controller", "deploy", *words, "-o", "json").json()
    assert (again["started"], again["pid"]) == (False, first["pid"])
    os.kill(first["pid"], signal.SIGKILL)
    serve.eventually(
        lambda: (
            (now := serve("controller", "status", "-o", "json")).code == 0
            and now.json()["pid"] != first["pid"]
        )
    )

    # A configuration that was changed there stays, until it is to be replaced; then the controller starts again with it.
    (far.home / "config.yaml").write_text("load_balancer: {first_port: 30500}\n")
    kept = serve.ok("controller", "deploy", *words)
    assert "kept the config.yaml" in kept.err
    replaced = serve.ok("controller", "deploy", *words, "--replace-config", "-o", "json").json()
    assert replaced["started"]
    assert (far.home / "config.yaml").read_text() == (serve.home / "config.yaml").read_text()


def test_files_that_the_configuration_names_are_copied_only_if_that_is_wanted(
    serve: Serve, far: Serve, sshd: Sshd, tmp_path: Path
) -> None:
    # The other host is this one, so what it does not have is a path that begins with ~, with another home directory here.
    (tmp_path / "me").mkdir()
    (tmp_path / "me" / "hook-of-mine").write_text("http://127.0.0.1:9/very-secret\n")
    here = {"HOME": str(tmp_path / "me")}
    serve.configure(notify=[{"name": "us", "webhook_file": "~/hook-of-mine"}])
    words = elsewhere(sshd, far.home, tmp_path / "serve")
    refused = serve("controller", "deploy", *words, env=here)
    assert refused.code == 2, refused.err
    assert "notify[0].webhook_file: ~/hook-of-mine" in refused.err
    assert "--copy-files" in refused.err
    assert not (far.home / "controller.sock").exists()
    serve.ok("controller", "deploy", *words, "--copy-files", env=here)
    (copy,) = (far.home / "files").iterdir()
    assert copy.stat().st_mode & 0o077 == 0
    assert yaml.safe_load((far.home / "config.yaml").read_text())["notify"][0]["webhook_file"] == str(copy)
    for path in far.home.rglob("*.log"):
        assert "very-secret" not in path.read_text()


def test_what_is_wrong_is_named(serve: Serve, far: Serve, sshd: Sshd, tmp_path: Path) -> None:
    words = elsewhere(sshd, far.home, tmp_path / "serve")
    for changed, code, sentence in (
        (["h1", *words[1:]], 2, "h1: must be ssh/HOST"),
        (["ssh/h1", *words[1:]], 2, "has no host h1 (it has none)"),
        ([*words, "--serve", "/nowhere/serve"], 2, "has no program /nowhere/serve"),
        ([*words, "--identity", str(tmp_path / "none")], 2, "--identity: there is no file"),
        ([*words, "--context", "local"], 2, "--context: local is the controller of this home"),
        ([*words, "--known-hosts", "/dev/null"], 2, "--known-hosts: there is no file /dev/null"),
    ):
        refused = serve("controller", "deploy", *changed)
        assert (refused.code, sentence in refused.err, refused.err.count("\n")) == (code, True, 1), (
            refused.err
        )
    # A controller that does not start says why.
    (serve.home / "config.yaml").write_text(
        f"controller: {{listen: {{port: {sshd.port}}}}}\nload_balancer: {{first_port: 30700}}\n"
    )
    refused = serve("controller", "deploy", *words)
    assert refused.code == 1
    assert "controller.listen" in refused.err
    sshd.stop()
    refused = serve("controller", "deploy", *words)
    assert (refused.code, "cannot be reached" in refused.err) == (1, True)
