"""Files that are replaced as a whole: after a crash, and for a reader at any time, they have the old content or the new one.

Part of what the host agent is (`remote.host_agent.bundle`), so it needs no more than Python 3.8 and its standard library.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_bytes(path: Path, content: bytes, *, mode: int = 0o666, is_durable: bool = False) -> None:
    """Write or replace the file. A new file has `mode` less the umask. `is_durable`: it also survives a power failure."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with os.fdopen(os.open(str(draft), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write or replace the file, in UTF-8."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: object) -> None:
    """Write or replace the file, as JSON in one line."""
    write_text(path, json.dumps(value))


def read_json(path: Path) -> Any:
    """Return the content, or None if there is no such file. Raises ValueError if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
