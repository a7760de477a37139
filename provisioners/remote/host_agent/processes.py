"""Processes of this machine, as /proc shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Return all living processes below `pid`, zombies left out."""
    children: dict[int, list[int]] = {}
    for child, parent, is_zombie in processes():
        if not is_zombie:
            children.setdefault(parent, []).append(child)
    found: list[int] = []
    frontier = [pid]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def names_of(pids: Iterable[int]) -> list[str]:
    """Return the names of their programs, as far as they are still there."""
    found = []
    for pid in pids:
        with suppress(OSError):
            found.append(Path(f"/proc/{pid}/comm").read_text(errors="replace").strip())
    return found


def processes() -> Iterator[tuple[int, int, bool]]:
    """(pid, parent's pid, is a zombie) of every process."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                # The command's name is in parentheses and may itself contain some.
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                yield int(folder.name), int(fields[1]), fields[0] in (b"Z", b"X")
