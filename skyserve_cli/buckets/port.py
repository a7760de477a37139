"""The port to object stores, and the URLs that name a place in one.

s3://BUCKET/PREFIX    gs://BUCKET/PREFIX    https://ACCOUNT.blob.core.windows.net/CONTAINER/PREFIX    file:///FOLDER
"""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

SCHEMES = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, https://ACCOUNT.blob.core.windows.net/CONTAINER/PREFIX or file:///FOLDER"

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_BLOB_HOST = re.compile(r"[a-z0-9]{3,24}\.blob\.core\.[a-z.]+")


class BucketError(Exception):
    """An object store does not do what was requested; the text names the place and the reason."""


class BadPlaceError(BucketError):
    """A URL names no place for objects."""


class Stored(NamedTuple):
    """An object; `size` in bytes."""

    name: str
    size: int


class Bucket(Protocol):
    """A place in an object store. All methods block for at most some minutes and raise BucketError."""

    def put(self, name: str, content: bytes) -> None:
        """Store an object, or replace it. After a crash it is there whole, or not at all."""

    def get(self, name: str) -> bytes:
        """Return an object's content. An object that does not exist is a BucketError."""

    def objects(self) -> list[Stored]:
        """Return the objects at this place, in no order; none if there is no such folder."""

    def delete(self, name: str) -> None:
        """Remove an object. One that does not exist is removed already."""


class Place(NamedTuple):
    """A prefix of a bucket, or a folder.

    `kind`: s3, gs, azure or file. `bucket` has the account's host in front on Azure, and is empty for a folder. `prefix` has no
    slash at its ends; for a folder it is the absolute path.
    """

    kind: str
    bucket: str
    prefix: str

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def parent(self) -> tuple[Place, str]:
        """Return the place above, and the last part of this one."""
        above, _, last = self.prefix.rpartition("/")
        return self._replace(prefix=above or ("/" if self.kind == "file" else "")), last

    @property
    def extra(self) -> str:
        """The extra of this package that has the vendor's SDK; empty for a folder."""
        return {"s3": "aws", "gs": "gcp", "azure": "azure"}.get(self.kind, "")

    @property
    def url(self) -> str:
        """The URL as it is shown. It has no secrets."""
        if self.kind == "file":
            return f"file://{self.prefix}"
        scheme = "https" if self.kind == "azure" else self.kind
        return f"{scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def is_url(text: str) -> bool:
    return "://" in text


def place_of(url: str) -> Place:
    """Return the place that a URL names. Raises BadPlaceError."""
    wrong = BadPlaceError(f"{url!r} is no place for objects; use {SCHEMES}")
    try:
        found = urlsplit(url)
    except ValueError as error:  # a bracket in the host
        raise wrong from error
    path = unquote(found.path).strip("/")
    if found.query or found.fragment or "@" in found.netloc or any(ord(c) < 32 for c in url + path):
        raise wrong
    if any(part in ("", ".", "..") for part in path.split("/")) and path:
        raise wrong
    if found.scheme == "file" and not found.netloc and path:
        return Place("file", "", f"/{path}")
    if found.scheme in ("s3", "gs") and _BUCKET.fullmatch(found.netloc):
        return Place(found.scheme, found.netloc, path)
    container, _, prefix = path.partition("/")
    if found.scheme == "https" and _BLOB_HOST.fullmatch(found.netloc) and _BUCKET.fullmatch(container):
        return Place("azure", f"{found.netloc}/{container}", prefix)
    raise wrong
