"""The places that name the version agree, and the files of the release name files that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from skyserve_cli import __version__

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
CONTAINERFILE = (ROOT / "packaging" / "Containerfile").read_text(encoding="utf-8")


def test_package_and_program_have_the_same_version() -> None:
    assert PROJECT["version"] == __version__


def test_the_changelog_has_the_version_first_below_what_is_unreleased() -> None:
    released = [one for one in re.findall(r"^## \[(.+?)\]", CHANGELOG, re.MULTILINE) if one != "Unreleased"]
    assert released[0] == __version__


def test_a_version_has_each_section_of_the_changelog_once() -> None:
    for part in re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]:
        names = re.findall(r"^### (.+)$", part, re.MULTILINE)
        assert len(names) == len(set(names)), part.splitlines()[0]
        assert set(names) <= SECTIONS


def test_the_image_copies_what_the_wheel_is_built_from() -> None:
    copied = {
        name for line in re.findall(r"^COPY (.+)$", CONTAINERFILE, re.MULTILINE) for name in line.split()[:-1]
    }
    assert {"pyproject.toml", "hatch_build.py"} <= copied
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_the_image_installs_extras_that_exist() -> None:
    (extras,) = re.findall(r"whl\)\[([a-z,]+)\]", CONTAINERFILE)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("requirement", re.findall(r'"([a-z-]+>=[\d.]+)"', CONTAINERFILE))
def test_the_agents_libraries_are_those_of_the_package(requirement: str) -> None:
    assert requirement in PROJECT["dependencies"]
