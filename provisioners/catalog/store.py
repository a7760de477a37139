"""Where catalogs are: packaged with the product, and refreshed in the user's home, one file per cloud."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path

from provisioners.catalog.codec import decode, encode
from provisioners.catalog.model import Catalog, CatalogError, Listing

FOLDER = "catalog"
_MAX_BYTES = 16 << 20


@cache
def packaged() -> Catalog:
    """What came with the product."""
    found = files(__package__).joinpath("data").iterdir()
    named = sorted((each for each in found if each.name.endswith(".json")), key=lambda each: each.name)
    return Catalog(tuple(listing for each in named for listing in decode(each.read_bytes(), each.name)))


def load(home: Path) -> Catalog:
    """The packaged catalog with the newer prices of the home's refreshed files. Raises CatalogError."""
    try:
        paths = sorted((home / FOLDER).glob("*.json"))
        overlay = [listing for path in paths for listing in decode(_content(path), str(path))]
    except OSError as error:
        raise CatalogError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return packaged().updated(overlay) if overlay else packaged()


def save(home: Path, cloud: str, listings: Iterable[Listing]) -> Path:
    """Keep a cloud's refreshed listings, in place of those kept before; the file is whole or not there."""
    path = home / FOLDER / f"{cloud}.json"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_suffix(f".{os.getpid()}.part")
    try:
        draft.write_text(encode(cloud, listings), encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def _content(path: Path) -> bytes:
    if path.stat().st_size > _MAX_BYTES:
        raise CatalogError(f"{path}: larger than {_MAX_BYTES} bytes")
    return path.read_bytes()
