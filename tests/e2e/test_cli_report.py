"""`serve report`, as a user runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

FILE = """
name: told
service: {readiness_probe: /health, replicas: 1}
resources: {infra: local, use_spot: true}
run: serve engine --profile l4-8b --speed 50 --port $SKYSERVE_REPLICA_PORT
"""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param([], "Missing argument", id="of whom"),
        pytest.param(["told", "--since", "lately"], "--since takes a duration such as", id="since when"),
        pytest.param(["told", "--out", "told.pdf"], "ends in .html or .png", id="no picture"),
        pytest.param(["told", "--out", "nowhere/told.png"], "cannot be written there", id="no folder"),
    ],
)
def test_wrong_usage_is_2(serve: Any, arguments: list[str], sentence: str) -> None:
    said = serve("report", *arguments)
    assert (said.code, said.out) == (2, "")
    assert sentence in said.err


def test_without_a_controller_nobody_knows(serve: Any) -> None:
    said = serve("report", "told")
    assert (said.code, said.out) == (1, "")
    assert "serve controller start" in said.err


def test_a_life_is_told_while_it_lasts_and_afterwards(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "told.yaml"
    file.write_text(FILE)
    serve.ok("up", file, "-y")
    serve.eventually(lambda: serve("report", "told").code == 0)

    said = serve("report", "tolt")
    assert (said.code, "did you mean told?" in said.err) == (1, True)
    now = serve.ok("report", "told", "-o", "json").json()
    assert (now["name"], now["down"], now["wanted"], now["availability"]) == ("told", False, 1, 1.0)
    assert now["usd"] > 0
    assert [(zone["capacity_type"], zone["hours"] > 0) for zone in now["zones"]] == [("spot", True)]

    serve.ok("down", "told", "-y")
    after = serve.ok("report", "told", "-o", "json").json()
    assert (after["down"], after["availability"]) == (True, 1.0)
    assert after["usd"] >= now["usd"]
    assert serve.ok("report", "told", "-o", "json").json() == after, "it is over: nothing changes any more"

    picture = tmp_path / "told.png"
    said = serve.ok("report", "told", "--out", picture)
    assert "The wanted replicas were ready 100.00% of the time" in said.out
    assert picture.read_bytes().startswith(b"\x89PNG")
