"""Where catalogs are: packaged with the product, and in the user's home.

catalog/CLOUD.json              newer prices, of `serve catalog refresh`
catalog/discovered/CLOUD.json   what the account can have, of `serve catalog discover`
catalog/extra.json              rows of the user's own
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path

from provisioners.files import write_text
from provisioners.offers.catalog import discovered, extra
from provisioners.offers.catalog.codec import decode, encode
from provisioners.offers.catalog.discovered import Discovery
from provisioners.offers.catalog.model import Catalog, CatalogError, Listing

FOLDER = "catalog"
DISCOVERED = "discovered"
EXTRA = "extra.json"
_MAX_BYTES = 16 << 20


@cache
def packaged() -> Catalog:
    """Return what came with the product."""
    found = files(__package__).joinpath("data").iterdir()
    named = sorted((each for each in found if each.name.endswith(".json")), key=lambda each: each.name)
    return Catalog(tuple(listing for each in named for listing in decode(each.read_bytes(), each.name)))


@dataclass(frozen=True, slots=True)
class Stock:
    """What there is to choose from, as a home knows it."""

    catalog: Catalog
    listed: Catalog  # without the rows of the user's own
    discoveries: tuple[Discovery, ...] = ()


def stock(home: Path) -> Stock:
    """Return the packaged catalog with what the home has beyond it.

    Discovered types and zones, newer prices, and rows of the user's own. The same object as long as no file has changed.
    Raises CatalogError.
    """
    try:
        version = tuple(_version(path) for path in _files(home))
    except OSError as error:
        raise CatalogError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return _stock(home, version) if version else _packaged_stock()


def load(home: Path) -> Catalog:
    """Return the catalog of the stock. Raises CatalogError."""
    return stock(home).catalog


@cache
def _packaged_stock() -> Stock:
    return Stock(packaged(), packaged())


@lru_cache(maxsize=8)
def _stock(home: Path, version: tuple[object, ...]) -> Stock:
    known = packaged()
    found = tuple(discovered.decode(_content(path), str(path)) for path in _discovery_files(home))
    if found:
        known = Catalog(tuple(discovered.with_discovered(known.listings, found)))
    overlay = [listing for path in _price_files(home) for listing in decode(_content(path), str(path))]
    known = known.updated(overlay) if overlay else known
    own, listed = home / FOLDER / EXTRA, known
    if own.exists():
        known = Catalog(tuple(extra.with_extra(known.listings, extra.decode(_content(own), str(own)))))
    return Stock(known, listed, found)


def _price_files(home: Path) -> list[Path]:
    return sorted(path for path in (home / FOLDER).glob("*.json") if path.name != EXTRA)


def _discovery_files(home: Path) -> list[Path]:
    return sorted((home / FOLDER / DISCOVERED).glob("*.json"))


def _files(home: Path) -> list[Path]:
    return [*_discovery_files(home), *sorted((home / FOLDER).glob("*.json"))]


def _version(path: Path) -> tuple[str, int, int, int]:
    stat = path.stat()
    return str(path), stat.st_mtime_ns, stat.st_size, stat.st_ino


def save_discovery(home: Path, discovery: Discovery) -> Path:
    """Keep what an account was found to have, in place of what was found before."""
    return _write(home / FOLDER / DISCOVERED / f"{discovery.cloud}.json", discovered.encode(discovery))


def save(home: Path, cloud: str, listings: Iterable[Listing]) -> Path:
    """Keep a cloud's refreshed listings, in place of those kept before; the file is whole or not there."""
    return _write(home / FOLDER / f"{cloud}.json", encode(cloud, listings))


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_text(path, text)
    return path


def _content(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CatalogError(f"{path}: larger than {_MAX_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise CatalogError(f"{path}: cannot be read: {error.strerror}") from error
