"""What a deployment is made of: the wheel, the unit, and the files that a configuration names."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path, PurePath
from typing import Any

import pytest
import yaml

from lb.agent.native_files import NOTE
from provisioners.remote.host_agent.tls_relay import LIBRARY
from skyserve_cli.config import Config
from skyserve_cli.controller.balancers.native_modules import (
    Choice,
    NativeSet,
    Python,
    look_script,
    pythons_of,
)
from skyserve_cli.deployment.deploy import copies_of, extras_of, named_files, with_paths
from skyserve_cli.deployment.host import HostFacts, unit_text
from skyserve_cli.deployment.move_checks import files_of
from skyserve_cli.deployment.wheel import PACKAGES, packed

ROOT = Path(__file__).parents[2]
FACTS = HostFacts(
    1000, "me", "/home/me", "/home/me/.skyserve", True, True, False, False, False, False, False, False
)


def own_python() -> Python:
    script = look_script([sys.executable])
    printed = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    (found,) = pythons_of(printed.stdout)
    return found


PYTHON = own_python()
NATIVE = NativeSet(
    PYTHON.suffix, {f"lb/core/x{PYTHON.suffix}": b"x", f"skyserve_lb__mypyc{PYTHON.suffix}": b"y"}, 2
)
OTHER = Python("python3", (3, 12), ".cpython-312-aarch64-linux-gnu.so", "aarch64", 36)
WHY = "there are no native modules for CPython 3.12 on aarch64"


@pytest.mark.parametrize(
    ("choice", "tag", "note"),
    [
        pytest.param(None, "py3-none-any", None, id="nothing is known of the host"),
        pytest.param(Choice(PYTHON, NATIVE, ""), PYTHON.tag, None, id="native modules that fit"),
        pytest.param(Choice(OTHER, None, WHY), "py3-none-any", f"{WHY}\n", id="none that fit"),
        pytest.param(Choice(PYTHON, NATIVE, WHY), PYTHON.tag, f"{WHY}\n", id="the helper alone"),
    ],
)
def test_a_wheel_is_for_the_python_of_its_native_modules(
    choice: Choice | None, tag: str, note: str | None, tmp_path: Path
) -> None:
    wheel = packed(distribution("skyserve"), ROOT, choice)
    assert wheel.file_name == f"skyserve-{distribution('skyserve').version}-{tag}.whl"
    (tmp_path / wheel.file_name).write_bytes(wheel.content)
    names = zipfile.ZipFile(tmp_path / wheel.file_name).namelist()
    natives = {} if choice is None or choice.native is None else choice.native.files
    libraries = {name for name in names if name.endswith(".so")}
    assert {name for name in libraries if PurePath(name).name != LIBRARY} == set(natives)
    target = tmp_path / "target"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target]
    subprocess.run([*pip, "--no-compile", tmp_path / wheel.file_name], check=True)
    assert {path: (target / path).read_bytes() for path in natives} == natives
    assert ((target / NOTE).read_text() if (target / NOTE).exists() else None) == note


@pytest.mark.long
def test_the_wheel_of_what_runs_here_is_installed_by_pip(tmp_path: Path) -> None:
    wheel = packed(distribution("skyserve"), ROOT)
    assert wheel.digest == packed(distribution("skyserve"), ROOT).digest
    (tmp_path / wheel.file_name).write_bytes(wheel.content)
    names = zipfile.ZipFile(tmp_path / wheel.file_name).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == set(PACKAGES)
    for path in (ROOT / "skyserve_cli").rglob("*.*"):
        if path.is_file() and path.suffix not in (".pyc", ".so"):
            assert path.relative_to(ROOT).as_posix() in names
    target = tmp_path / "target"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target]
    subprocess.run([*pip, tmp_path / wheel.file_name], check=True)
    assert (target / "bin" / "serve").is_file()
    script = "import skyserve_cli.deployment.wheel as w; print(w.__file__)"
    shown = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(target)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.startswith(str(target))


def test_a_unit_restarts_the_controller_and_ends_nothing_else(tmp_path: Path) -> None:
    facts = FACTS
    text = unit_text(facts, "/home/me/with space 100%/serve")
    for line in (
        'Environment="SKYSERVE_HOME=/home/me/.skyserve"',
        'ExecStart="/home/me/with space 100%%/serve" controller start --foreground',
        "Restart=on-failure",
        "KillMode=process",
        "WantedBy=default.target",
    ):
        assert f"\n{line}\n" in text
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze, which would check the unit")
    path = tmp_path / "skyserve-controller.service"
    path.write_text(unit_text(facts, "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True)
    assert path.name not in done.stderr, done.stderr


def test_homes_have_units_of_their_own() -> None:
    other = HostFacts(
        1000, "me", "/home/me", "/srv/two", True, True, False, False, False, False, False, False
    )
    assert FACTS.unit == "skyserve-controller"
    assert other.unit.startswith("skyserve-controller-")


CONFIG = """
clouds:
  ssh:
    pools:
      rack: {user: me, identity_file: ~/.ssh/id, hosts: [{address: h, known_hosts: "/etc/known"}]}   # a comment
  kubernetes: {kubeconfig: /k, labels: {known_hosts: {}}}
controller: {listen: {port: 9000, certfile: /c.pem, keyfile: null}}
"""


def test_the_files_of_a_configuration_are_found_and_replaced_in_its_text() -> None:
    found = named_files(CONFIG)
    assert [(one.key, one.path) for one in found] == [
        ("clouds.ssh.pools.rack.identity_file", "~/.ssh/id"),
        ("clouds.ssh.pools.rack.hosts[0].known_hosts", "/etc/known"),
        ("clouds.kubernetes.kubeconfig", "/k"),
        ("controller.listen.certfile", "/c.pem"),
    ]
    text = with_paths(CONFIG, found[:2], "/home/me/.skyserve/files")
    assert "# a comment" in text
    before, after = yaml.safe_load(CONFIG), yaml.safe_load(text)
    pool = after["clouds"]["ssh"]["pools"]["rack"]
    names = copies_of(found)
    assert pool["identity_file"] == f"/home/me/.skyserve/files/{names['~/.ssh/id']}"
    assert pool["hosts"][0]["known_hosts"].endswith("-known")
    pool["identity_file"], pool["hosts"][0]["known_hosts"] = "~/.ssh/id", "/etc/known"
    assert after == before
    assert named_files("") == []


def test_a_host_gets_the_sdks_of_its_clouds_and_of_its_backups() -> None:
    assert extras_of(Config()) == ()
    config = {
        "controller": {"backup": {"to": "s3://box-1", "passphrase_file": "/p"}},
        "clouds": {"gcp": {}, "local": {}},
    }
    assert extras_of(Config.model_validate(config)) == ("aws", "gcp")
    config["controller"] = {"backup": {"to": "file:///srv", "passphrase_file": "/p"}}
    assert extras_of(Config.model_validate(config)) == ("gcp",)


def test_a_move_names_the_files_of_this_host_and_those_that_were_sent_to_it() -> None:
    sent = f"upload://{'a' * 64}/workdir"
    mounts = [{"path": "c", "sources": ["/etc/c", "s3://b/x"]}]
    rows: dict[str, list[dict[str, Any]]] = {
        "services": [{"name": "chat", "version": 2, "down": 0}, {"name": "old", "version": 1, "down": 1}],
        "versions": [
            {"service": "chat", "version": 1, "spec": {"workdir": "/before"}},
            {"service": "chat", "version": 2, "spec": {"workdir": sent, "file_mounts": mounts}},
            {"service": "old", "version": 1, "spec": {"workdir": "/old"}},
        ],
    }
    found = {path for _, path in files_of(rows, "/there/uploads/trees")}
    assert {"/etc/c", f"/there/uploads/trees/{'a' * 64}/workdir"} <= found
    assert not found & {"/before", "/old", sent}
