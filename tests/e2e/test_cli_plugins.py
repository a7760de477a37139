"""Clouds of other packages, as users have them: installed beside the product, seen by every command, harmless if broken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.clouds.schedules import only_long

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "10-a-cloud-of-your-own"

BROKEN = {
    "nomodule": ("nowhere_at_all:PLUGIN", "", "cannot be loaded: ModuleNotFoundError"),
    "raises": ("raises_cloud:PLUGIN", "1 / 0", "cannot be loaded: ZeroDivisionError"),
    "noplugin": ("noplugin_cloud:PLUGIN", "PLUGIN = 7", "its entry point is no CloudPlugin but int"),
    "elder": (
        "elder_cloud:PLUGIN",
        "from provisioners.plugins import CloudPlugin\n"
        "PLUGIN = CloudPlugin('elder', machines=lambda setup: None, api_version=0)",
        "it is for version 0 of the interface",
    ),
    "lists": (
        "lists_cloud:PLUGIN",
        "from provisioners.plugins import CloudPlugin\n"
        "PLUGIN = CloudPlugin('lists', machines=lambda setup: None, listings=lambda: 1 / 0)",
        "cannot list what it has: ZeroDivisionError",
    ),
    "makes": (
        "makes_cloud:PLUGIN",
        "from provisioners.plugins import CloudPlugin\n"
        "PLUGIN = CloudPlugin('makes', machines=lambda setup: 1 / 0)",
        "failed: ZeroDivisionError",
    ),
}


def install(folder: Path, package: str, entry_points: dict[str, str]) -> None:
    """As an installer leaves it: the file with the entry points."""
    info = folder / f"{package}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in entry_points.items())
    (info / "entry_points.txt").write_text(f"[skyserve.clouds]\n{lines}")


def configure(serve: Any, **clouds: Any) -> None:
    serve.home.mkdir(exist_ok=True)
    (serve.home / "config.yaml").write_text(yaml.safe_dump({"clouds": {"local": {}, **clouds}}))


@pytest.fixture
def meadow(serve: Any, tmp_path: Path) -> Iterator[Any]:
    """The example, installed, with its cloud on loopback. Yields the cloud's world."""
    folder = tmp_path / "site"
    shutil.copytree(EXAMPLE / "meadow", folder / "meadow")
    install(folder, "skyserve_meadow", {"meadow": "meadow:PLUGIN"})
    serve.environment["PYTHONPATH"] = str(folder)
    sys.path.insert(0, str(folder))
    try:
        fake = import_module("meadow.fake")
        world = fake.World()
        key = tmp_path / "key"
        key.write_text(fake.KEY)
        with fake.serving(world) as url:
            configure(serve, meadow={"url": url, "api_key_file": str(key)})
            yield world
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == "meadow"]:
            del sys.modules[name]


def test_an_installed_cloud_is_checked_planned_and_configured_like_ours(serve: Any, meadow: Any) -> None:
    found = {one["cloud"]: one for one in serve.ok("check", "-o", "json").json()}
    assert found["meadow"]["usable"]
    assert found["meadow"]["zones"] == ["north/north-1", "north/north-2", "south/south-1"]
    launches = serve.ok("plan", EXAMPLE / "service.yaml", "-o", "json").json()["launches"]
    assert {one["instance_type"] for one in launches} == {"sheep-1"}
    assert {one["cloud"] for one in launches} == {"meadow"}
    meadow.key = "another"
    (refused,) = (one for one in serve("check", "-o", "json").json() if one["cloud"] == "meadow")
    assert (refused["usable"], "clouds.meadow.api_key_file" in refused["why"]) == (False, True)


def test_what_is_wrong_with_its_section_is_said_with_the_path(serve: Any, meadow: Any) -> None:
    configure(serve, meadow={"api_key": "x"})
    said = serve("check")
    assert said.code == 2
    assert "clouds.meadow.api_key: meadow has no such setting" in said.err
    configure(serve, meadow={"api_key_file": "x", "regions": ["nort"]})
    (found,) = (one for one in serve("check", "-o", "json").json() if one["cloud"] == "meadow")
    assert "clouds.meadow.regions: meadow has no region 'nort'; did you mean 'north'?" in found["why"]


def test_a_cloud_that_is_not_enabled_is_listed_with_what_to_do(serve: Any, meadow: Any) -> None:
    configure(serve)
    out = serve.ok("check").out
    assert "meadow" in out
    assert "add `meadow:` under `clouds`" in " ".join(out.split())


def test_broken_plugins_are_named_and_the_other_clouds_serve(serve: Any, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    for name, (_, text, _) in BROKEN.items():
        (folder / f"{name}_cloud.py").write_text(text)
    install(folder, "broken", {name: value for name, (value, _, _) in BROKEN.items()})
    serve.environment["PYTHONPATH"] = str(folder)
    configure(
        serve, **{name: {"any": "setting"} if name in ("nomodule", "raises") else {} for name in BROKEN}
    )
    found = {one["cloud"]: one for one in serve.ok("check", "-o", "json").json()}
    assert found["local"]["usable"]
    for name, (_, _, why) in BROKEN.items():
        assert not found[name]["usable"]
        assert f"the plug-in {name!r}" in found[name]["why"]
        assert why in found[name]["why"]
    url = serve.ok("up", ROOT / "examples/01-hello-engine/service.yaml", "-y").out.strip()
    assert url.startswith("http://")


@only_long  # the contract runs for each cloud in every run
def test_the_contract_runs_from_another_package(tmp_path: Path) -> None:
    """The command of docs/plugins.md."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"),
            *("-p", "provisioners.contract.pytest_plugin", "--skyserve-cloud=meadow.testing:MeadowSubject"),
            *("--pyargs", "provisioners.contract.suite", "provisioners.contract.troubles"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{EXAMPLE}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "53 passed" in done.stdout
