"""What is shown while local files are sent to a controller on another host."""

from __future__ import annotations

import pytest

from skyserve_cli.commands.uploads import UploadProgress


def test_a_line_for_each_path_that_was_sent(capsys: pytest.CaptureFixture[str]) -> None:
    shown = UploadProgress()
    for path, sent, total in (
        ("/a", 0, 5_000_000),
        ("/a", 4_000_000, 5_000_000),
        ("/a", 5_000_000, 5_000_000),
        ("/b", 0, 0),
        ("/c", 0, 1),
        ("/c", 1, 1),
    ):
        shown.show(path, sent, total)
    assert capsys.readouterr().err == "sent 5,000,000 bytes of /a\nsent 1 bytes of /c\n"
