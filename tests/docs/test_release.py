"""A release has one version, and what the workflow calls is there."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import yaml

from scripts.release import ROOT, disagreements, notes

WORKFLOWS = ROOT / ".github/workflows"


def test_package_chart_and_changelog_agree() -> None:
    assert disagreements(version("skyserve")) == []
    assert disagreements("9.9.9") == [
        f"pyproject.toml is {version('skyserve')}, not 9.9.9",
        f"the version of the chart is {version('skyserve')}, not 9.9.9",
        f"the appVersion of the chart is {version('skyserve')}, not 9.9.9",
        "CHANGELOG.md has no section [9.9.9]",
    ]


def test_notes_are_one_section() -> None:
    changelog = "# C\n\n## [0.3.0] - x\n\n### Added\n\n- one\n\n## [0.2.0] - y\n\n- two\n"
    assert notes("0.3.0", changelog) == "### Added\n\n- one"
    assert notes("0.2.0", changelog) == "- two"
    assert notes("0.1.0", changelog) == ""


def test_workflows_are_yaml_and_name_files_that_exist() -> None:
    for path in WORKFLOWS.glob("*.yml"):
        text = path.read_text()
        assert yaml.safe_load(text)["jobs"]
        for name in re.findall(r"(?:scripts|packaging|deploy|\.github)/[\w./-]+\w", text):
            assert Path(ROOT / name).exists(), f"{path.name}: {name}"
