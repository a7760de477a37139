"""A folder as an object store, for example on a network file system."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from provisioners.files import write_bytes
from skyserve_cli.buckets.port import BucketError, Place, Stored

if TYPE_CHECKING:
    from collections.abc import Iterator


class Folder:
    """See `port.Bucket`. Objects are files that only their owner may read."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._root = Path(place.prefix)

    def put(self, name: str, content: bytes) -> None:
        with self._sentences():
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_bytes(self._root / name, content, mode=0o600, is_durable=True)

    def get(self, name: str) -> bytes:
        with self._sentences():
            return (self._root / name).read_bytes()

    def objects(self) -> list[Stored]:
        with self._sentences():
            if not self._root.exists():
                return []
            return [Stored(path.name, path.stat().st_size) for path in self._root.iterdir() if path.is_file()]

    def delete(self, name: str) -> None:
        with self._sentences():
            (self._root / name).unlink(missing_ok=True)

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BucketError(f"{self._place.url}: {error.strerror or error}") from error
