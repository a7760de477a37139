"""The store of uploaded files: what is missing, what is accepted, what is removed, and what a crash leaves."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from skyserve_cli.controller.references import ManifestError, Reference, path_of
from skyserve_cli.controller.uploads import content_store
from skyserve_cli.controller.uploads.content_store import (
    ContentStore,
    NoRoomForUploadError,
    NotUploadedError,
    decode_parts,
    encode_parts,
)
from skyserve_cli.controller.uploads.folder import manifest_of
from skyserve_cli.controller.uploads.manifest import FILE, FOLDER, PART_BYTES, Entry, Manifest
from skyserve_cli.controller.uploads.sending import Local, send, with_references


class World:
    def __init__(self, folder: Path) -> None:
        self.home = folder / "uploads"
        self.store = ContentStore(self.home)
        self.source = folder / "project"
        (self.source / "sub").mkdir(parents=True)
        (self.source / "a.py").write_text("print()")
        (self.source / "run.sh").write_text("echo")
        (self.source / "run.sh").chmod(0o755)
        (self.source / "empty").touch()
        (self.source / "sub" / "big").write_bytes(os.urandom(PART_BYTES) + b"end")
        (self.source / "sub" / "link").symlink_to("../a.py")
        self.bodies: list[bytes] = []

    def manifest(self) -> Manifest:
        return manifest_of(self.source, "workdir", {})

    def send(self) -> int:
        def store(body: bytes) -> None:
            self.bodies.append(body)
            self.store.add(decode_parts(body))

        local = Local(self.source, self.manifest())
        return send(local, lambda _: self.store.announce(local.manifest), store, lambda sent, total: None)

    def tree(self, manifest: Manifest) -> Path:
        return Path(path_of(self.home, manifest.reference))

    def files(self) -> set[str]:
        return {path.name for path in self.home.rglob("*") if path.is_file()}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_folder_arrives_as_it_is(world: World) -> None:
    assert world.send() == PART_BYTES + 3 + 7 + 4
    tree = world.tree(world.manifest())
    assert manifest_of(tree, "workdir", {}) == world.manifest()
    assert (tree / "sub" / "big").read_bytes() == (world.source / "sub" / "big").read_bytes()
    assert (tree / "sub" / "link").readlink() == Path("../a.py")
    assert stat.S_IMODE((tree / "run.sh").stat().st_mode) == 0o755
    assert stat.S_IMODE(world.home.stat().st_mode) == 0o700
    assert world.send() == 0


def test_only_what_changed_is_sent(world: World) -> None:
    world.send()
    first = world.manifest()
    (world.source / "a.py").write_text("print(2)")
    assert world.send() == len("print(2)")
    assert (world.tree(first) / "a.py").read_text() == "print()"
    assert (world.tree(world.manifest()) / "a.py").read_text() == "print(2)"
    with (world.source / "sub" / "big").open("ab") as file:
        file.write(b"!")
    assert world.send() == 4


def test_an_upload_that_is_cut_off_goes_on_where_it_was(world: World) -> None:
    local, sent = Local(world.source, world.manifest()), []

    def dies(body: bytes) -> None:
        if sent:
            raise ConnectionError
        sent.append(world.store.add(decode_parts(body)))

    with pytest.raises(ConnectionError):
        send(local, lambda _: world.store.announce(local.manifest), dies, lambda *_: None)
    with pytest.raises(NotUploadedError):
        world.store.insist_on([Reference(local.manifest.id, "workdir")])
    world.store = ContentStore(world.home)  # and the controller was killed
    assert 0 < world.send() < local.manifest.size
    world.store.insist_on([Reference(local.manifest.id, "workdir")])


def test_parts_are_checked(world: World) -> None:
    part = next(iter(world.manifest().parts()))
    with pytest.raises(NotUploadedError, match="was not announced"):
        world.store.add([(part, b"x")])
    world.store.announce(world.manifest())
    size = world.manifest().parts()[part]
    with pytest.raises(ManifestError, match="is another one"):
        world.store.add([(part, b"x" * size)])
    with pytest.raises(NotUploadedError):
        world.store.add([(part, b"x" * (size + 1))])
    assert world.files() == set()


def test_a_manifest_takes_no_more_room_than_it_names(world: World) -> None:
    world.send()
    large, size = max(world.manifest().parts().items(), key=lambda each: each[1])
    entries = [Entry("workdir", FOLDER)]
    entries += [Entry(f"workdir/{number}", FILE, 0o755, 1, (large,)) for number in range(3)]
    assert size > 1
    with pytest.raises(ManifestError, match="is of another size"):
        world.store.announce(Manifest(tuple(entries)))


def test_bodies_are_checked() -> None:
    assert decode_parts(encode_parts({"a": b"12", "b": b"3"})) == [("a", b"12"), ("b", b"3")]
    for body in (
        b"",
        b'[["a", 2]]\nx',
        b'[["a", 1]]\nxy',
        b'[["a", 0]]\n',
        b"[1]\n",
        b'[["a", 9999999999]]\n',
    ):
        with pytest.raises(ManifestError):
            decode_parts(body)


def test_two_commands_may_send_the_same(world: World) -> None:
    manifest = world.manifest()
    parts = {}
    for entry in manifest.entries:
        for place, digest in enumerate(entry.parts):
            with (world.source / entry.path.partition("/")[2]).open("rb") as file:
                file.seek(place * PART_BYTES)
                parts[digest] = file.read(PART_BYTES)
    world.store.announce(manifest)
    world.store.announce(manifest)
    world.store.add(parts.items())
    world.store.add(parts.items())
    assert world.store.announce(manifest) == []


def test_what_no_version_needs_is_removed_and_parts_of_the_rest_stay(world: World) -> None:
    world.send()
    old = world.manifest()
    (world.source / "a.py").write_text("print(2)")
    world.send()
    new = world.manifest()
    later = (world.home / "trees" / f"{new.id}.json").stat().st_mtime + 10
    assert world.store.prune([old.id], before=later - 1000) == 0
    assert world.store.prune([new.id], before=later) == 1
    assert not world.tree(old).exists()
    assert world.store.announce(new) == []
    (world.source / "a.py").write_text("print(3)")
    assert world.send() == len("print(3)")
    assert world.store.prune([], before=later + 1e6) == 2
    assert world.files() == set()


@pytest.mark.parametrize("step", range(6))
def test_a_controller_that_is_killed_leaves_no_half_tree(
    world: World, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the entry with this number is made: nothing of Python's own cleaning up runs."""
    made: list[str] = []
    make = ContentStore._make

    def killed(self: ContentStore, entry: object, path: Path) -> None:
        if len(made) == step:
            os._exit(9)
        made.append(path.name)
        make(self, entry, path)  # type: ignore[arg-type]

    child = os.fork()
    if child == 0:
        ContentStore._make = killed  # type: ignore[method-assign]
        try:
            world.send()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not world.tree(world.manifest()).exists()
    assert world.send() == 0
    assert manifest_of(world.tree(world.manifest()), "workdir", {}) == world.manifest()
    world.store.prune([world.manifest().id], before=2e10)
    assert [path.name for path in (world.home / "trees").iterdir() if path.name.startswith(".draft")] == []


def test_a_full_store_is_a_sentence(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_store, "MOST_STORED_BYTES", PART_BYTES)
    with pytest.raises(NoRoomForUploadError, match="0 MiB are uploaded already, and 4 MiB are the most"):
        world.store.announce(world.manifest())
    monkeypatch.undo()
    monkeypatch.setattr(content_store, "LEAST_FREE_BYTES", 1 << 60)
    with pytest.raises(NoRoomForUploadError, match="are free on the controller's disk"):
        world.store.announce(world.manifest())


def test_a_spec_gets_references(world: World, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{}")
    spec = {
        "name": "chat",
        "workdir": str(world.source),
        "file_mounts": [{"path": "c.json", "sources": [str(tmp_path / "c.json"), "s3://b/x"]}],
    }
    changed, found = with_references(spec, {})
    assert changed["workdir"] == world.manifest().reference
    assert changed["file_mounts"][0]["sources"][0].endswith("/c.json")
    assert changed["file_mounts"][0]["sources"][1] == "s3://b/x"
    assert [local.source for local in found] == [world.source, tmp_path / "c.json"]
    assert spec["workdir"] == str(world.source)
    with pytest.raises(ManifestError, match=r"workdir: .*/nothing"):
        with_references({"workdir": str(tmp_path / "nothing")}, {})
