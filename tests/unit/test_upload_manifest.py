"""Manifests from other hosts: what is accepted, and which names and links are not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyserve_cli.controller.references import ManifestError, Reference, read_reference, references_of
from skyserve_cli.controller.uploads.folder import Known, manifest_of, part_of
from skyserve_cli.controller.uploads.manifest import (
    FILE,
    FOLDER,
    LINK,
    MOST_BYTES,
    PART_BYTES,
    Entry,
    Manifest,
    checked,
    manifest_from,
    stays_inside,
)

PART = "a" * 64
TOP = Entry("workdir", FOLDER)


def file(path: str, **more: Any) -> Entry:
    return Entry(path, FILE, 0o644, 3, (PART,))._replace(**more)


def test_a_manifest_comes_back_from_its_json() -> None:
    manifest = Manifest((TOP, file("workdir/a"), Entry("workdir/l", LINK, link="a")))
    again = manifest_from(manifest.to_json())
    assert (again, again.id, again.size, again.name) == (manifest, manifest.id, 3, "workdir")
    assert read_reference(manifest.reference) == Reference(manifest.id, "workdir")
    assert manifest.id != Manifest((TOP, file("workdir/a", mode=0o755))).id


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        pytest.param([file("../etc")], "is no path below a folder", id="above"),
        pytest.param([TOP, file("workdir/../../etc")], "is no path below a folder", id="above, from below"),
        pytest.param([file("/etc/passwd")], "is no path below a folder", id="absolute"),
        pytest.param([TOP, file("workdir//a")], "is no path below a folder", id="an empty name"),
        pytest.param([TOP, file("workdir/.")], "is no path below a folder", id="the folder itself"),
        pytest.param([TOP, file("workdir/a\0b")], "is no path below a folder", id="a null byte"),
        pytest.param([TOP, file("workdir/" + "n" * 256)], "is too long", id="a long name"),
        pytest.param([TOP, file("workdir/\udcff")], "not UTF-8", id="not UTF-8"),
        pytest.param([TOP, file("other/a")], "not in a folder", id="beside the whole"),
        pytest.param([TOP, Entry("second", FOLDER)], "not below the first", id="two wholes"),
        pytest.param([TOP, file("workdir/a"), file("workdir/a")], "is there twice", id="twice"),
        pytest.param([TOP, file("workdir/a"), file("workdir/a/b")], "not in a folder", id="below a file"),
        pytest.param(
            [TOP, Entry("workdir/l", LINK, link="sub"), file("workdir/l/b")],
            "not in a folder",
            id="below a link",
        ),
        pytest.param([TOP, file("workdir/sub/b")], "not in a folder", id="a folder that is not named"),
        pytest.param(
            [TOP, Entry("workdir/l", LINK, link="/etc")], "out of the folder", id="an absolute link"
        ),
        pytest.param([TOP, Entry("workdir/l", LINK, link="../x")], "out of the folder", id="a link above"),
        pytest.param(
            [TOP, Entry("workdir/l", LINK, link="a/../../x")],
            "out of the folder",
            id="a link up after a name",
        ),
        pytest.param([Entry("workdir", LINK, link="a")], "is a link|out of the folder", id="only a link"),
        pytest.param([TOP, Entry("workdir/l", LINK)], "lacks it", id="a link without a target"),
        pytest.param([TOP, file("workdir/a", link="b")], "and is none", id="a file with a target"),
        pytest.param([TOP, file("workdir/a", mode=0o4755)], "unknown kind or mode", id="setuid"),
        pytest.param([TOP, Entry("workdir/d", "device")], "unknown kind or mode", id="a device"),
        pytest.param([TOP, file("workdir/a", size=-1)], "parts for -1 bytes", id="a negative size"),
        pytest.param([TOP, file("workdir/a", size=PART_BYTES + 1)], "1 parts for", id="too few parts"),
        pytest.param([TOP, file("workdir/a", parts=("../x",))], "is no SHA-256", id="a part that is a path"),
        pytest.param(
            [TOP, file("workdir/a", size=3), file("workdir/b", size=4)],
            "of another size elsewhere",
            id="a part with two sizes",
        ),
        pytest.param(
            [TOP, Entry("workdir/d", FOLDER, size=1)], "0 parts for 1 bytes", id="a folder with bytes"
        ),
    ],
)
def test_what_is_not_accepted(entries: list[Entry], problem: str) -> None:
    with pytest.raises(ManifestError, match=problem):
        manifest_from(Manifest(tuple(entries)).to_json())


def test_the_sum_is_bounded() -> None:
    count = MOST_BYTES // PART_BYTES
    half = file("workdir/a", size=MOST_BYTES, parts=(PART,) * count)
    checked(Manifest((TOP, half)))
    with pytest.raises(ManifestError, match=r"has 10\.7 GB, and 10\.7 GB are the most"):
        checked(Manifest((TOP, half, file("workdir/b", parts=("b" * 64,)))))


@pytest.mark.parametrize(
    "value",
    [None, {}, [], [None], [{}], [{"path": "a"}], [{**file("a")._asdict(), "parts": [1]}],
     [{**file("a")._asdict(), "mode": True, "parts": []}], [{**file("a")._asdict(), "size": "3", "parts": []}],
     [{**file("a")._asdict(), "more": 1}]],
)  # fmt: skip
def test_other_json(value: Any) -> None:
    with pytest.raises(ManifestError):
        manifest_from(value)


@pytest.mark.parametrize(
    "text", ["upload://x/a", f"upload://{PART}/..", f"upload://{PART}/a/b", f"upload://{PART}"]
)
def test_references_that_cannot_be_right(text: str) -> None:
    with pytest.raises(ManifestError, match="is no reference"):
        read_reference(text)


def test_references_of_a_spec() -> None:
    one, two = f"upload://{PART}/workdir", f"upload://{'b' * 64}/c.json"
    spec = {"workdir": one, "file_mounts": [{"path": "c", "sources": [two, "s3://b/x", "/local"]}]}
    assert references_of(spec) == [Reference(PART, "workdir"), Reference("b" * 64, "c.json")]
    assert references_of({"workdir": None, "file_mounts": []}) == []


NAMES = st.sampled_from(["a", "b", "..", ".", "l"])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["l", "a/l", "a/b/l", "a/k", "k"]), st.lists(NAMES, min_size=1, max_size=5)
        ),
        max_size=4,
    )
)
def test_no_chain_of_accepted_links_leads_out(links: list[tuple[str, list[str]]]) -> None:
    import shutil
    import tempfile

    root = Path(tempfile.mkdtemp()).resolve()
    try:
        top = root / "top"
        (top / "a" / "b").mkdir(parents=True)
        for path, names in links:
            target = "/".join(names)
            place = top / path
            if stays_inside(f"top/{path}", target) and not place.is_symlink():
                place.symlink_to(target)
        for path in top.rglob("*"):
            if path.is_symlink():
                try:
                    found = Path(os.path.realpath(path, strict=True))
                except OSError:  # a loop, or nothing there
                    continue
                assert found.is_relative_to(top), (path, path.readlink())
    finally:
        shutil.rmtree(root)


# --- of a folder -----------------------------------------------------------------------------------------------


def test_a_folder_is_read_by_the_rules_of_machines(tmp_path: Path) -> None:
    source = tmp_path / "project"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / ".git").mkdir()
    (source / ".git" / "config").write_text("x")
    (source / ".skyignore").write_text("*.log\n")
    (source / "a.log").write_text("x")
    (source / "run.sh").write_text("echo")
    (source / "run.sh").chmod(0o775)
    (source / "key").write_text("secret")
    (source / "key").chmod(0o600)
    (source / "sub" / "link").symlink_to("../run.sh")
    os.mkfifo(source / "pipe")
    known: Known = {}
    manifest = manifest_of(source, "workdir", known)
    found = {entry.path: (entry.kind, oct(entry.mode)) for entry in manifest.entries}
    assert found == {
        "workdir": ("folder", "0o755"),
        "workdir/.skyignore": ("file", "0o644"),
        "workdir/key": ("file", "0o600"),
        "workdir/run.sh": ("file", "0o755"),
        "workdir/sub": ("folder", "0o755"),
        "workdir/sub/empty": ("folder", "0o755"),
        "workdir/sub/link": ("link", "0o755"),
    }
    moved = source.rename(tmp_path / "elsewhere")
    assert manifest_of(moved, "workdir", {}).id == manifest.id
    (moved / "key").write_text("other!")
    assert manifest_of(moved, "workdir", {}).id != manifest.id


def test_a_large_file_has_parts_and_a_change_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"a" * PART_BYTES + b"b" * 10)
    (entry,) = manifest_of(path, "weights", {}).entries
    assert (len(entry.parts), entry.size) == (2, PART_BYTES + 10)
    assert part_of(path, 1, entry.parts[1]) == b"b" * 10
    path.write_bytes(b"a" * PART_BYTES + b"c" * 10)
    with pytest.raises(ManifestError, match="was changed while it was sent"):
        part_of(path, 1, entry.parts[1])


def test_a_link_out_of_the_folder_names_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to("/usr/bin/python3")
    with pytest.raises(ManifestError, match=r"workdir/python is a link to /usr/bin/python3, .*\.skyignore"):
        manifest_of(tmp_path, "workdir", {})
    (tmp_path / ".skyignore").write_text("python\n")
    manifest_of(tmp_path, "workdir", {})
