"""Every example of the local cloud is valid, can be planned, and serves."""

from __future__ import annotations

import os
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.clouds.schedules import is_long

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.parent.name for path in ROOT.glob("examples/*/service.yaml"))
PLUGINS = {path.parent.name for path in ROOT.glob("examples/*/pyproject.toml")}  # test_cli_plugins has them
RENTED = {name for name in EXAMPLES if 10 < int(name[:2]) < 19}  # test_cli_cloud_examples has them
ALIKE = {"04-autoscaling", "06-two-nodes", "08-riskhedge", "19-python"}  # that serve as others do
NEEDS_NAMESPACES = {"05-fixed-port"}
CAN_ISOLATE = os.geteuid() == 0 and shutil.which("ip") is not None


def test_every_example_has_a_file_and_a_lesson() -> None:
    folders = [path for path in sorted((ROOT / "examples").iterdir()) if path.is_dir()]
    assert [folder.name for folder in folders] == EXAMPLES
    assert all((folder / "README.md").read_text().startswith("# ") for folder in folders)


@pytest.mark.parametrize("example", [one for one in EXAMPLES if one not in PLUGINS | RENTED])
def test_the_example_is_right_without_a_warning_has_a_plan_and_serves(serve: Any, example: str) -> None:
    file = ROOT / "examples" / example / "service.yaml"
    assert serve.ok("validate", file, "-o", "json").json()["warnings"] == []
    assert serve.ok("plan", file, "-o", "json").json()["launches"]
    if example in ALIKE and not is_long:
        return
    if example in NEEDS_NAMESPACES and not CAN_ISOLATE:
        pytest.skip("needs network namespaces, hence root")
    url = serve.ok("up", file, "-y").out.strip()
    path = "/" if example in NEEDS_NAMESPACES else "/v1/models"
    with urllib.request.urlopen(f"{url}{path}", timeout=30) as answer:
        assert answer.status == 200
