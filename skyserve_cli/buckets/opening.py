"""From a URL to the bucket that it names. A vendor's SDK is imported when a bucket of the vendor is opened."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from provisioners.files import write_bytes
from skyserve_cli.buckets.port import Bucket, BucketError, Place, Stored

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


def bucket_at(place: Place, *, aws_profile: str | None = None) -> Bucket:
    """Return the bucket; nothing is called yet. Raises BucketError if the vendor's SDK is missing or has no credentials."""
    try:
        match place.kind:
            case "s3":
                from skyserve_cli.buckets.s3 import S3Bucket

                return S3Bucket(place, aws_profile)
            case "gs":
                from skyserve_cli.buckets.gcs import GcsBucket

                return GcsBucket(place)
            case "azure":
                from skyserve_cli.buckets.azure import AzureBucket

                return AzureBucket(place)
            case _:
                return Folder(place)
    except ImportError as error:
        raise BucketError(
            f"{place.url} needs the Python package {error.name}; install skyserve[{place.extra}]"
        ) from error
