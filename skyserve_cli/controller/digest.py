"""What a working directory holds, in a few characters."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_BLOCK_BYTES = 1 << 20


def folder_digest(folder: Path) -> str:
    """Equal for folders with the same names, the same bytes and the same executable bits; empty if there is no
    such folder. What is not copied to replicas (`.git`, special files) does not count."""
    if not folder.is_dir():
        return ""
    digest = hashlib.sha256()
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != ".git")
        for name in sorted(files):
            path = Path(root, name)
            digest.update(os.fsencode(path.relative_to(folder)) + b"\0")
            if path.is_symlink():
                digest.update(b"link " + os.fsencode(os.readlink(path)))  # noqa: PTH115 - bytes as they are
            elif path.is_file():
                digest.update(b"x " if os.access(path, os.X_OK) else b"- ")
                with path.open("rb") as file:
                    while block := file.read(_BLOCK_BYTES):
                        digest.update(block)
            digest.update(b"\0")
    return digest.hexdigest()
