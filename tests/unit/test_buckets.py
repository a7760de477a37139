"""URLs of places for objects, and a folder as one."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from skyserve_cli.buckets.opening import bucket_at
from skyserve_cli.buckets.port import BadPlaceError, BucketError, Place, place_of
from skyserve_cli.config import ConfigError, load_config


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://my-bucket", Place("s3", "my-bucket", "")),
        ("s3://my-bucket/a/b/", Place("s3", "my-bucket", "a/b")),
        ("gs://my_bucket/a", Place("gs", "my_bucket", "a")),
        (
            "https://acc0unt.blob.core.windows.net/box/a/b",
            Place("azure", "acc0unt.blob.core.windows.net/box", "a/b"),
        ),
        ("file:///srv/backups", Place("file", "", "/srv/backups")),
    ],
)
def test_places(url: str, place: Place) -> None:
    assert place_of(url) == place
    assert place_of(place.url) == place


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///prefix",
        "s3://UPPER/x",
        "s3://key:secret@bucket",
        "gs://bucket/../other",
        "https://example.com/box",
        "https://account.blob.core.windows.net/",
        "https://account.blob.core.windows.net/box?sig=secret",
        "file://host/folder",
        "file:///",
        "ftp://bucket/x",
        "s3://bucket/a\0b",
        "s3://bucket/a%00b",
        "file:///a%0Ab",
        "https://[bucket/a",
    ],
)
def test_no_places(url: str) -> None:
    with pytest.raises(BadPlaceError, match="is no place for objects; use s3://BUCKET/PREFIX"):
        place_of(url)


def test_a_folder_keeps_objects(tmp_path: Path) -> None:
    folder = bucket_at(place_of(f"file://{tmp_path}/deep/er"))
    assert folder.objects() == []
    folder.put("a", b"1")
    folder.put("a", b"22")
    folder.put("b", b"")
    assert {each.name: each.size for each in folder.objects()} == {"a": 2, "b": 0}
    assert folder.get("a") == b"22"
    assert stat.S_IMODE((tmp_path / "deep" / "er" / "a").stat().st_mode) == 0o600
    folder.delete("a")
    folder.delete("a")
    assert [each.name for each in folder.objects()] == ["b"]
    with pytest.raises(BucketError, match="No such file"):
        folder.get("a")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{to: s3://b-1}", "controller.backup.passphrase_file: is missing (file on the controller's host"),
        ("{to: b, passphrase_file: /p}", "controller.backup.to: 'b' is no place for objects"),
        (
            "{to: s3://b-1, passphrase_file: p}",
            "controller.backup.passphrase_file: p must be an absolute path",
        ),
        ("{to: s3://b-1, passphrase_file: /p, keep: 0}", "controller.backup.keep: "),
        ("{to: s3://b-1, passphrase_file: /p, kep: 1}", "controller.backup.kep: there is no such setting"),
    ],
)
def test_configuration(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"controller: {{backup: {text}}}\n")
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert problem in str(error.value)


def test_defaults_of_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("controller: {backup: {to: 's3://b-1/p', passphrase_file: ~/p}}\n")
    backup = load_config(file).controller.backup
    assert backup is not None
    assert (backup.keep, backup.every_hours, backup.passphrase_file) == (14, 24.0, Path.home() / "p")
