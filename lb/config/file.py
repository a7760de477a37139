"""The last accepted table on disk, so that a restarted agent serves at once, with or without its controller."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lb.config.schema import Table


def load(path: Path) -> Table | None:
    """Return the stored table; None if there is no such file. Raises WireError, ValueError or OSError otherwise."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return Table.from_json(json.loads(text))


def save(path: Path, table: Table) -> None:
    """Write or replace the stored table."""
    write_text(path, json.dumps(table.to_json()) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace the file in one step: a reader, or a crash, sees the old content or the new one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
