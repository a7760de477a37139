"""Uploaded files in the home of the controller.

    uploads/parts/SHA256            a part of a file
    uploads/trees/ID.json           a manifest
    uploads/trees/ID/NAME           what it describes; nothing changes in it
    uploads/trees/.draft-…          what is being made, or removed

Everything appears whole, by a rename, so a controller that is killed leaves a draft at most. The folder is closed to other users;
the files in a tree have the modes of the originals, because machines get them.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import threading
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from provisioners.files import write_bytes
from skyserve_cli.controller.references import ManifestError, Reference
from skyserve_cli.controller.rejected import RejectedError
from skyserve_cli.controller.uploads.manifest import (
    FILE,
    FOLDER,
    PART_BYTES,
    Entry,
    Manifest,
    manifest_from,
)

MOST_STORED_BYTES = 64 << 30
LEAST_FREE_BYTES = 256 << 20
_DRAFT = ".draft-"


class NoRoomForUploadError(RejectedError):
    """The store, or its disk, is too full; the text has how full."""

    status = 507


class NotUploadedError(RejectedError):
    """Files are missing that have to be sent first; the text names what."""

    status = 409


class ContentStore:
    """Thread-safe, for one process. `root` is made when something is uploaded."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._parts = root / "parts"
        self._trees = root / "trees"
        self._lock = threading.Lock()
        self._announced: dict[str, int] = {}

    def announce(self, manifest: Manifest) -> list[str]:
        """Return the parts that are missing; if there is none, the tree is complete.

        Raises NoRoomForUploadError, ManifestError for a part that is here with another size, OSError.
        """
        with self._lock:
            record = self._trees / f"{manifest.id}.json"
            if (self._trees / manifest.id).is_dir() and record.exists():
                os.utime(record)
                return []
            for folder in (self._root, self._parts, self._trees):
                folder.mkdir(mode=0o700, exist_ok=True)
            missing = {}
            for part, size in manifest.parts().items():
                try:
                    os.utime(self._parts / part)  # it is needed from now on
                except FileNotFoundError:
                    missing[part] = size
                    continue
                if (self._parts / part).stat().st_size != size:
                    raise ManifestError(f"the part {part[:12]} is of another size")
            if missing:
                self._insist_on_room(sum(missing.values()))
                self._announced |= missing
                return list(missing)
            self._insist_on_room(manifest.size)
            self._build(manifest, record)
            return []

    def add(self, parts: Iterable[tuple[str, bytes]]) -> int:
        """Store parts that were announced as missing; returns how many.

        Raises NotUploadedError for one that was not announced, ManifestError for one with other content, OSError.
        """
        count = 0
        for digest, content in parts:
            if (self._parts / digest).exists() and self._announced.get(digest) is None:
                continue  # another command has sent it meanwhile
            if self._announced.get(digest) != len(content):
                raise NotUploadedError(f"the part {digest[:12]} was not announced; send the manifest first")
            if hashlib.sha256(content).hexdigest() != digest:
                raise ManifestError(f"the content of part {digest[:12]} is another one")
            write_bytes(self._parts / digest, content, mode=0o600)
            with self._lock:
                self._announced.pop(digest, None)
            count += 1
        return count

    def insist_on(self, references: Iterable[Reference]) -> None:
        """Raise NotUploadedError unless all of these are complete. They are kept for a day at least."""
        for reference in references:
            if not reference.below(self._root).exists():
                raise NotUploadedError(
                    f"the files of {reference.name} are not at the controller; run the command again, which sends them"
                )
            with suppress(FileNotFoundError):
                os.utime(self._trees / f"{reference.id}.json")

    def prune(self, in_use: Collection[str], before: float) -> int:
        """Remove trees that are not `in_use` (by id) and were not announced since `before` (UNIX time), and parts without a tree.

        Returns how many trees were removed. Raises OSError.
        """
        if not self._trees.exists():
            return 0
        removed = 0
        with self._lock:
            kept: set[str] = set()
            for record in list(self._trees.glob("*.json")):
                if record.stem in in_use or record.stat().st_mtime >= before:
                    kept |= manifest_from(json.loads(record.read_text())).parts().keys()
                    continue
                self._discard(self._trees / record.stem)
                record.unlink()
                removed += 1
            for draft in self._trees.glob(f"{_DRAFT}*"):
                if draft.stat().st_mtime < before:
                    shutil.rmtree(draft)
            for part in self._parts.iterdir():
                if part.name not in kept and part.stat().st_mtime < before:
                    part.unlink()
        return removed

    def _discard(self, tree: Path) -> None:
        if tree.exists():
            draft = self._draft()
            tree.rename(draft)
            shutil.rmtree(draft)

    def _draft(self) -> Path:
        return self._trees / f"{_DRAFT}{secrets.token_hex(8)}"

    def _insist_on_room(self, needed: int) -> None:
        stored = sum(part.stat().st_size for part in os.scandir(self._parts))
        if stored + needed > MOST_STORED_BYTES:
            raise NoRoomForUploadError(
                f"{stored >> 20} MiB are uploaded already, and {MOST_STORED_BYTES >> 20} MiB are the most"
            )
        free = shutil.disk_usage(self._root).free
        if free < needed + LEAST_FREE_BYTES:
            raise NoRoomForUploadError(
                f"{free >> 20} MiB are free on the controller's disk, and {(needed + LEAST_FREE_BYTES) >> 20} MiB are needed"
            )

    def _build(self, manifest: Manifest, record: Path) -> None:
        """Make the tree of a manifest from its parts."""
        draft = self._draft()
        draft.mkdir(mode=0o700)
        try:
            for entry in manifest.entries:
                self._make(entry, draft / entry.path)
            os.sync()
            self._discard(self._trees / manifest.id)  # of before, without its record
            draft.rename(self._trees / manifest.id)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        write_bytes(record, json.dumps(manifest.to_json()).encode(), mode=0o600, is_durable=True)

    def _make(self, entry: Entry, path: Path) -> None:
        if entry.kind == FOLDER:
            path.mkdir()
            path.chmod(entry.mode)
        elif entry.kind != FILE:
            path.symlink_to(entry.link)
        elif len(entry.parts) == 1 and entry.mode == 0o644:
            os.link(self._parts / entry.parts[0], path)
            path.chmod(entry.mode)
        else:
            with path.open("xb") as out:
                for part in entry.parts:
                    with (self._parts / part).open("rb") as content:
                        shutil.copyfileobj(content, out, PART_BYTES)
            path.chmod(entry.mode)


def encode_parts(parts: Mapping[str, bytes]) -> bytes:
    """Return the body of a request: a line of JSON with digests and sizes, then the parts one after another."""
    head = json.dumps([[digest, len(content)] for digest, content in parts.items()])
    return b"".join([head.encode(), b"\n", *parts.values()])


def decode_parts(body: bytes) -> list[tuple[str, bytes]]:
    """Return the inverse. Raises ManifestError."""
    head, _, content = body.partition(b"\n")
    found, offset = [], 0
    try:
        sizes = [(str(digest), int(size)) for digest, size in json.loads(head)]
    except (ValueError, TypeError):
        raise ManifestError("the first line must be JSON with digests and sizes") from None
    for digest, size in sizes:
        if not 0 < size <= PART_BYTES:
            raise ManifestError(f"a part has 1 to {PART_BYTES} bytes, not {size}")
        found.append((digest, content[offset : offset + size]))
        offset += size
    if offset != len(content):
        raise ManifestError(f"{offset} bytes were named, and {len(content)} were sent")
    return found
