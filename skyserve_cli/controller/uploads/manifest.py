"""What a file or folder contains, as a value: names, kinds, modes, and the digests of the parts of its files. Pure.

A manifest comes from another host, so nothing in it is trusted: `manifest_from` accepts no name and no link that leads out of the
folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, NamedTuple

from skyserve_cli.controller.references import SCHEME, ManifestError

PART_BYTES = 4 << 20
MOST_BYTES = 10 << 30
MOST_ENTRIES = 30_000

FOLDER, FILE, LINK = "folder", "file", "link"
#: Modes that files and folders may have: readable for others or not, executable or not.
MODES = (0o600, 0o644, 0o700, 0o755)

_LONGEST_PATH_BYTES = 4000
_LONGEST_NAME_BYTES = 255
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Entry(NamedTuple):
    """A file, folder or symbolic link.

    `path` begins with the name of the whole, with / between names. `size` in bytes and `parts` are of a file, `link` is the target
    of a link.
    """

    path: str
    kind: str
    mode: int = 0o755
    size: int = 0
    parts: tuple[str, ...] = ()
    link: str = ""

    def sizes(self) -> list[tuple[str, int]]:
        """Return each part with its size."""
        return [
            (part, min(PART_BYTES, self.size - place * PART_BYTES)) for place, part in enumerate(self.parts)
        ]


class Manifest(NamedTuple):
    """Entries in the order of their paths, folders before what they contain. The first one is the whole."""

    entries: tuple[Entry, ...]

    @property
    def name(self) -> str:
        return self.entries[0].path

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)

    @property
    def id(self) -> str:
        """Return the SHA-256 of the manifest: equal for equal content."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    @property
    def reference(self) -> str:
        """Return what a spec has in place of the path."""
        return f"{SCHEME}{self.id}/{self.name}"

    def parts(self) -> dict[str, int]:
        """Return the size of each part, by its digest."""
        return dict(each for entry in self.entries for each in entry.sizes())

    def to_json(self) -> list[dict[str, Any]]:
        return [{**entry._asdict(), "parts": list(entry.parts)} for entry in self.entries]


def manifest_from(value: Any) -> Manifest:
    """Return the manifest in a decoded JSON value. Raises ManifestError if anything in it is not as it should be."""
    if not isinstance(value, list) or not value:
        raise ManifestError("a manifest is a list of entries")
    if len(value) > MOST_ENTRIES:
        raise ManifestError(
            f"{len(value):,} files and folders are more than {MOST_ENTRIES:,}: name what is not needed in .skyignore"
        )
    return checked(Manifest(tuple(_entry(one) for one in value)))


def _entry(value: Any) -> Entry:
    if not isinstance(value, dict) or value.keys() != set(Entry._fields):
        raise ManifestError(f"an entry has the keys {', '.join(Entry._fields)}")
    path, kind, mode, size, parts, link = (value[name] for name in Entry._fields)
    texts = (path, kind, link, *parts) if isinstance(parts, list) else (None,)
    if not all(isinstance(text, str) for text in texts) or type(mode) is not int or type(size) is not int:
        raise ManifestError(f"{str(path)[:80]!r}: a value has the wrong type")
    return Entry(path, kind, mode, size, tuple(parts), link)


def checked(manifest: Manifest) -> Manifest:
    """Return the manifest. Raises ManifestError if a name or a link leads out of it, or if it is too large."""
    kinds: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for place, entry in enumerate(manifest.entries):
        _check_path(entry.path)
        above = entry.path.rpartition("/")[0]
        if entry.path in kinds:
            raise ManifestError(f"{entry.path!r} is there twice")
        if (place == 0) != (above == ""):
            raise ManifestError(f"{entry.path!r} is not below the first entry")
        if above and kinds.get(above) != FOLDER:  # a link here would lead elsewhere
            raise ManifestError(f"{entry.path!r} is not in a folder that was named before")
        _check_content(entry)
        kinds[entry.path] = entry.kind
        for part, size in entry.sizes():
            if sizes.setdefault(part, size) != size:  # one of them takes more room than it names
                raise ManifestError(f"{entry.path!r} has a part that is of another size elsewhere")
    if manifest.entries[0].kind == LINK:
        raise ManifestError(f"{manifest.name} is a link")
    if manifest.size > MOST_BYTES:
        raise ManifestError(
            f"{manifest.name} has {manifest.size / 1e9:.1f} GB, and {MOST_BYTES / 1e9:.1f} GB are the most that is sent: name "
            "what is not needed in its .skyignore, or mount a bucket"
        )
    return manifest


def _check_path(path: str) -> None:
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        raise ManifestError(f"{path!a} has a name that is not UTF-8") from None
    names = path.split("/")
    if any(name in ("", ".", "..") for name in names) or "\0" in path:
        raise ManifestError(f"{path[:200]!r} is no path below a folder")
    if len(encoded) > _LONGEST_PATH_BYTES or any(len(name.encode()) > _LONGEST_NAME_BYTES for name in names):
        raise ManifestError(f"{path[:80]!r}… is too long")


def _check_content(entry: Entry) -> None:
    count = -(-entry.size // PART_BYTES)
    is_file = entry.kind == FILE
    if entry.kind not in (FOLDER, FILE, LINK) or entry.mode not in MODES:
        raise ManifestError(f"{entry.path!r} has an unknown kind or mode")
    if not 0 <= entry.size <= (MOST_BYTES if is_file else 0) or len(entry.parts) != count:
        raise ManifestError(f"{entry.path!r} has {len(entry.parts)} parts for {entry.size} bytes")
    if not all(_DIGEST.fullmatch(part) for part in entry.parts):
        raise ManifestError(f"{entry.path!r} has a part that is no SHA-256")
    if (entry.kind == LINK) != bool(entry.link):
        raise ManifestError(f"{entry.path!r} has a link's target and is none, or lacks it")
    if entry.kind == LINK and not stays_inside(entry.path, entry.link):
        raise ManifestError(
            f"{entry.path} is a link to {entry.link[:200]}, out of the folder: name it in .skyignore, or replace it by a copy"
        )


def stays_inside(path: str, target: str) -> bool:
    """Return whether a link at `path` leads to something in the same whole, whichever links its way goes through.

    `..` may stand only at the start of the target. There each one leaves a folder of the manifest; after a name, that name could be
    a link to a place higher up.
    """
    if target.startswith("/") or "\0" in target or len(target.encode(errors="replace")) > _LONGEST_PATH_BYTES:
        return False
    names = [name for name in target.split("/") if name not in ("", ".")]
    up = next((place for place, name in enumerate(names) if name != ".."), len(names))
    return ".." not in names[up:] and up < path.count("/")
