"""The manifest of a file or folder of this host, by the rules by which files are sent to machines (`provisioners.remote.archive`)."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import NamedTuple

from provisioners.remote.archive import entries_of
from skyserve_cli.controller.references import ManifestError
from skyserve_cli.controller.uploads.manifest import FILE, FOLDER, LINK, PART_BYTES, Entry, Manifest, checked


class _State(NamedTuple):
    """What changes when a file's content does."""

    path: str
    inode: int
    size: int
    changed_ns: int


#: Digests of the parts of files that were read already.
Known = MutableMapping[_State, tuple[str, ...]]


def manifest_of(source: Path, name: str, known: Known) -> Manifest:
    """Return what is at `source`, under this name; files that are `known` are not read again. Raises ManifestError."""
    try:
        entries = [source] if source.is_file() else list(entries_of(source))
        return checked(Manifest(tuple(_entry(path, source, name, known) for path in entries)))
    except OSError as error:
        raise ManifestError(f"{error.filename or source}: {error.strerror or error}") from error


def part_of(path: Path, place: int, digest: str) -> bytes:
    """Return a part of a file. Raises ManifestError if it is not the one with this digest any more."""
    try:
        with path.open("rb") as file:
            file.seek(place * PART_BYTES)
            content = file.read(PART_BYTES)
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror or error}") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise ManifestError(f"{path} was changed while it was sent; try again")
    return content


def _entry(path: Path, source: Path, name: str, known: Known) -> Entry:
    inside = name if path == source else f"{name}/{path.relative_to(source).as_posix()}"
    found = path.stat() if path == source else path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return Entry(inside, LINK, link=str(path.readlink()))
    mode = 0o700 if found.st_mode & 0o100 else 0o600
    if found.st_mode & 0o044:
        mode |= 0o055 if mode & 0o100 else 0o044
    if stat.S_ISDIR(found.st_mode):
        return Entry(inside, FOLDER, mode=0o755)
    state = _State(str(path), found.st_ino, found.st_size, found.st_mtime_ns)
    if state not in known:
        known[state] = tuple(_digests(path))
    return Entry(inside, FILE, mode, found.st_size, known[state])


def _digests(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while part := file.read(PART_BYTES):
            yield hashlib.sha256(part).hexdigest()
