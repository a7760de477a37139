"""Azure Blob Storage by Microsoft's SDK, with the credentials of the environment, `az login` or a managed identity.

A blob of this size is stored by one Put Blob, which is atomic: `_SINGLE_PUT_BYTES` is the most that the service takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

from azure.core.credentials import TokenCredential
from azure.core.exceptions import AzureError, ResourceNotFoundError
from azure.identity import DefaultAzureCredential
from azure.storage.blob import ContainerClient

from skyserve_cli.buckets.port import BucketError, Place, Stored

_SINGLE_PUT_BYTES = 5000 << 20
_TIMEOUT_S = 60


class AzureBucket:
    """See `port.Bucket`. `credential` and `account` (a URL) stand in for those that follow from the place."""

    def __init__(
        self, place: Place, credential: TokenCredential | None = None, account: str | None = None
    ) -> None:
        self._place = place
        self._credential = credential
        self._account = account

    @cached_property
    def _container(self) -> ContainerClient:
        host, _, container = self._place.bucket.partition("/")
        return ContainerClient(
            self._account or f"https://{host}",
            container,
            credential=self._credential or DefaultAzureCredential(process_timeout=20),
            max_single_put_size=_SINGLE_PUT_BYTES,
            retry_total=3,
            connection_timeout=10,
            read_timeout=_TIMEOUT_S,
        )

    def put(self, name: str, content: bytes) -> None:
        with self._sentences():
            self._container.upload_blob(self._place.key(name), content, overwrite=True)

    def get(self, name: str) -> bytes:
        with self._sentences():
            return self._container.download_blob(self._place.key(name)).readall()

    def objects(self) -> list[Stored]:
        below = self._place.key("")
        with self._sentences():
            found = self._container.list_blobs(name_starts_with=below)
            names = [Stored(str(blob.name).removeprefix(below), int(blob.size)) for blob in found]
            return [each for each in names if "/" not in each.name]

    def delete(self, name: str) -> None:
        with self._sentences():
            try:
                self._container.delete_blob(self._place.key(name))
            except ResourceNotFoundError:
                return

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except (AzureError, OSError) as error:
            raise BucketError(f"{self._place.url}: {str(error).splitlines()[0][:300]}") from error
