"""Files that are replaced as a whole, and durations as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioners.durations import seconds_of
from provisioners.files import read_json, write_bytes, write_json, write_text


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_json(path, {"port": 80})
    assert read_json(path) == {"port": 80}
    write_text(path, '"é"')
    assert read_json(path) == "é"
    assert [one.name for one in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_private_file_stays_private(tmp_path: Path, is_durable: bool) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"old")
    path.chmod(0o644)
    write_bytes(path, b"secret", mode=0o600, is_durable=is_durable)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"secret", 0o600)


def test_what_cannot_be_replaced_keeps_its_content_and_leaves_no_draft(tmp_path: Path) -> None:
    folder = tmp_path / "taken"
    (folder / "inside").mkdir(parents=True)
    with pytest.raises(OSError):
        write_text(folder, "text")
    assert [one.name for one in tmp_path.iterdir()] == ["taken"]


def test_a_missing_file_is_none_and_a_broken_one_an_error(tmp_path: Path) -> None:
    assert read_json(tmp_path / "none.json") is None
    (tmp_path / "file").write_text("{")
    assert read_json(tmp_path / "file" / "below.json") is None
    with pytest.raises(ValueError):
        read_json(tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), (" 10s ", 10.0), ("2 m", 120.0), ("1.5h", 5400.0), ("7d", 604800.0), ("30", 30.0)],
)
def test_a_duration(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1w", "1h30m", "1e3", "ten"])
def test_what_is_no_duration(text: str) -> None:
    assert seconds_of(text) is None
