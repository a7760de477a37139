"""A folder as a stream: the files for a machine, and no more.

Left out: `.git`, sockets and pipes, and what `.skyignore` in the folder says, or, if there is none, what its
`.gitignore` says (both in git's own syntax). The stream is a gzipped tar, written as it is sent, never kept; gzip has
a checksum, so a machine that got only the first part of it knows.
"""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from pathspec import GitIgnoreSpec

MAX_BYTES = 10 * 1024**3
IGNORE_FILES = (".skyignore", ".gitignore")
_COMPRESSION = 1  # text gets small with any; weights with none
_GZIP = 31  # zlib's number for the format, with the largest window


class PackingError(Exception):
    """The folder cannot be sent; the message is a sentence."""


def pack(source: Path, name: str, stream: BinaryIO, max_bytes: int = MAX_BYTES) -> None:
    """Write the file or folder, called `name` in the archive. Raises PackingError before anything is written."""
    if not source.exists():
        raise PackingError(f"there is no {source} on this machine")
    try:
        entries = [source] if source.is_file() else list(entries_of(source))
        size = sum(entry.lstat().st_size for entry in entries)
    except OSError as error:
        raise PackingError(f"{source} cannot be read: {error}") from error
    secret = next((one for one in entries if not one.is_symlink() and not os.access(one, os.R_OK)), None)
    if secret is not None:
        raise PackingError(f"{secret} cannot be read by this user: name it in .skyignore if it is not needed")
    if size > max_bytes:
        raise PackingError(
            f"{source} has {size / 1e9:.1f} GB, and {max_bytes / 1e9:.1f} GB are the most that is sent: name what is "
            "not needed in its .skyignore, or mount a bucket"
        )
    packed = _Gzip(stream)
    with tarfile.open(mode="w|", fileobj=cast(BinaryIO, packed), format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            inside = name if entry == source else f"{name}/{entry.relative_to(source)}"
            archive.add(str(entry), arcname=inside, recursive=False, filter=_nobodys)
    packed.finish()


class _Gzip:
    """Ends only on request: what an error cut short must not look whole, as it would if it were closed on the way out like a file is."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._packer = zlib.compressobj(_COMPRESSION, wbits=_GZIP)

    def write(self, data: bytes) -> int:
        self._stream.write(self._packer.compress(data))
        return len(data)

    def finish(self) -> None:
        self._stream.write(self._packer.flush())


def entries_of(folder: Path) -> Iterator[Path]:
    """Yield the folder and everything in it that is to be sent, folders before what they contain."""
    ignored = _ignored(folder)
    yield folder
    yield from _below(folder, folder, ignored)


def _below(folder: Path, top: Path, ignored: GitIgnoreSpec) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        is_folder = entry.is_dir() and not entry.is_symlink()
        path = f"{entry.relative_to(top)}/" if is_folder else str(entry.relative_to(top))
        if entry.name == ".git" or ignored.match_file(path):
            continue
        if is_folder:
            yield entry
            yield from _below(entry, top, ignored)
        elif entry.is_symlink() or entry.is_file():
            yield entry


def _ignored(folder: Path) -> GitIgnoreSpec:
    for name in IGNORE_FILES:
        path = folder / name
        if path.is_file():
            return GitIgnoreSpec.from_lines(path.read_text(errors="replace").splitlines())
    return GitIgnoreSpec.from_lines([])


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """On the machine everything is of the user who unpacks it."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
