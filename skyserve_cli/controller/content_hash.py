"""What a working directory, or a file, holds, in a few characters."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_BLOCK_BYTES = 1 << 20


def folder_digest(folder: Path) -> str:
    """Equal for folders with the same names, the same bytes and the same executable bits; empty if there is no such folder.

    Files that are not copied to replicas (`.git`, special files) do not count. A file is like a folder that has nothing else.
    """
    if not folder.exists():
        return ""
    digest = hashlib.sha256()
    if folder.is_file():
        _add(digest, folder)
        return digest.hexdigest()
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != ".git")
        for name in sorted(files):
            path = Path(root, name)
            digest.update(os.fsencode(path.relative_to(folder)) + b"\0")
            if path.is_symlink():
                digest.update(b"link " + os.fsencode(os.readlink(path)))  # noqa: PTH115 - bytes as they are
            elif path.is_file():
                _add(digest, path)
            digest.update(b"\0")
    return digest.hexdigest()


def _add(digest: hashlib._Hash, path: Path) -> None:
    digest.update(b"x " if os.access(path, os.X_OK) else b"- ")
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
