"""A part of another package in a controller as users run it: the example of CONTRIBUTING.md, and its row, after a crash too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyserve_cli.controller.api.client import ControllerClient
from skyserve_cli.home import Home
from tests.integration.test_parts import EXAMPLE

pytestmark = pytest.mark.long


def call(serve: Any, method: str, path: str, body: object = None) -> Any:
    return ControllerClient(Home.from_environment(serve.environment))._json(method, path, body)


def test_a_part_lives_in_the_controller(serve: Any, tmp_path: Path) -> None:
    assert EXAMPLE is not None
    site = tmp_path / "site"
    info = site / "notes-0.1.0.dist-info"
    info.mkdir(parents=True)
    (site / "notes.py").write_text(EXAMPLE[1])
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: notes\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[skyserve.parts]\nnotes = notes:Notes\n")
    serve.environment["PYTHONPATH"] = str(site)
    serve.home.mkdir(exist_ok=True)
    (serve.home / "config.yaml").write_text("parts: {notes: {keep: 7}}")
    refused = serve("controller", "start")
    assert (refused.code, "parts.notes.keep: notes has no such setting" in refused.err) == (2, True)

    (serve.home / "config.yaml").write_text("parts: {notes: {keep_days: 7}}")
    serve.ok("controller", "start")
    assert "notes: 0 of the last 7 days" in serve.ok("controller", "status").out
    call(serve, "POST", "/v1/services/chat/notes", {"text": "zone a is noisy"})
    psutil.Process(json.loads((serve.home / "controller.json").read_text())["pid"]).kill()

    def kept() -> bool:
        return "notes: 1 of the last 7 days" in serve("controller", "status").out

    serve.eventually(kept)
    (note,) = call(serve, "GET", "/v1/services/chat/notes")["notes"]
    assert (note["text"], note["author"]) == ("zone a is noisy", "owner")
