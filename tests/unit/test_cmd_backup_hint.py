"""The hint of `serve up` about the keys of the home, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyserve_cli.commands.up import hint_at_backup
from skyserve_cli.home import Home


def test_the_first_service_on_a_cloud_gets_a_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = Home(tmp_path / "home", "sqlite://")
    hint_at_backup(here, {"local", "ssh"})
    assert capsys.readouterr().err == ""
    hint_at_backup(here, {"local", "aws"})
    told = capsys.readouterr().err
    assert f"the keys in {here.root}" in told
    assert "serve controller backup FILE --passphrase-file PASSPHRASE" in told
    hint_at_backup(here, {"gcp"})
    assert capsys.readouterr().err == ""
