"""What the home knows of its own state: whose it is, and how far it had come.

A database that was deleted, replaced by an older copy, or exchanged for another one looks like a first start, or like a day
before. The home remembers the owner and the count of changes, beside the database, so that the difference is seen before
anything is launched, adopted or terminated. Owners that a home had before are kept: their machines are tagged with them, and
`serve gc` looks for these, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from provisioners.files import write_json
from skyserve_cli.home import Home


@dataclass(frozen=True, slots=True)
class KnownState:
    """`changes` counts what was written (`Database.changes`); `former` are owners of before, the latest first."""

    owner: str
    changes: int
    former: tuple[str, ...] = ()

    def followed_by(self, owner: str, changes: int) -> KnownState:
        """Return what is known once the home goes on with a database of this owner."""
        before = (self.owner, *self.former) if owner != self.owner else self.former
        return KnownState(
            owner, changes, tuple(dict.fromkeys(each for each in before if each not in ("", owner)))
        )


def read_known(home: Home) -> KnownState | None:
    """Return None if the home has had no database, or only one of an earlier release."""
    try:
        found = json.loads(home.known_state.read_text())
        return KnownState(str(found["owner"]), int(found["changes"]), tuple(map(str, found["former"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_known(home: Home, state: KnownState) -> None:
    """Raise OSError. After a power cut an earlier one may be there, which no sound database is older than."""
    write_json(home.known_state, asdict(state))


def go_on_with(home: Home, owner: str, changes: int) -> None:
    """From now on this is the home's state. Raises OSError."""
    known = read_known(home) or KnownState("", 0)
    write_known(home, known.followed_by(owner, changes))


def why_other(known: KnownState | None, owner: str, changes: int) -> str:
    """Return why a database is not the one that the home knows; "" if it is. `owner` is "" for one that is new."""
    if known is None or not known.owner:
        return ""
    if not owner:
        return f"is empty, and this home had one (owner {known.owner})"
    if owner != known.owner:
        return f"is another one than this home had (owner {owner}, not {known.owner})"
    if changes < known.changes:
        return (
            f"is older than the one that this home had: {known.changes - changes} later changes are missing"
        )
    return ""


def why_gone(home: Home, file: Path) -> str:
    """Return that there is no file where there was a database, and the way out; "" if there is one, or never was."""
    if file.exists() and file.stat().st_size:
        return ""
    known, remains = read_known(home), _what_remains(home)
    if (known is None or not known.owner) and not remains:
        return ""
    beside = f", whose {' and '.join(remains)} are there" if remains else ""
    return f"{file} is gone, and this home had a database{beside}; {way_out(home, is_gone=True)}"


def _what_remains(home: Home) -> list[str]:
    """Return what a home without a database has that only one with a database can have made."""
    return [
        what
        for what, paths in (
            ("copies", home.backups.glob("*.db")),
            ("load balancers", _folders(home.load_balancers)),
            ("machines of the local cloud", _folders(home.root / "local" / "instances")),
        )
        if any(True for _ in paths)
    ]


def way_out(home: Home, *, is_gone: bool = False, saved: Path | None = None) -> str:
    """Return the commands that end the trouble, for the end of a sentence. `saved` is a file that is being written."""
    from skyserve_cli.state.copies import copies  # SQLite, which `serve status` does not need

    rescued = saved or next(iter(sorted(home.backups.glob(RESCUED), reverse=True)), None)
    newest = rescued or next(iter(copies(home.backups)), None)
    source = "FILE" if newest is None else str(newest)
    what = "the state as it was last" if rescued else "the newest copy" if newest else "a backup"
    other = "begins with an empty one" if is_gone else "goes on with the database as it is"
    return (
        f"`serve controller restore {source} --force` restores {what}, `serve controller adopt` {other}, "
        "and `serve controller start` starts the controller then"
    )


#: What a controller saves of a database whose file is gone, while it still has it open.
RESCUED = "rescued-*.db"


def _folders(parent: Path) -> Iterator[Path]:
    return (each for each in parent.glob("*") if each.is_dir())
