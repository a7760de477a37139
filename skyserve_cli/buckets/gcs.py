"""Google Cloud Storage by Google's SDK, with the application default credentials. One upload request is atomic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import google.auth
import requests
from google.api_core.exceptions import GoogleAPIError, NotFound
from google.auth.credentials import Credentials
from google.auth.exceptions import GoogleAuthError
from google.cloud.storage import Client

from skyserve_cli.buckets.port import BucketError, Place, Stored

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_TIMEOUT_S = 60.0


class GcsBucket:
    """See `port.Bucket`. `credentials` and `endpoint` (a URL) stand in for those that the SDK finds."""

    def __init__(
        self, place: Place, credentials: Credentials | None = None, endpoint: str | None = None
    ) -> None:
        self._place = place
        self._credentials = credentials
        self._endpoint = endpoint

    @cached_property
    def _bucket(self) -> Any:
        credentials, project = self._credentials, None
        if credentials is None:
            credentials, project = google.auth.default(scopes=[_SCOPE])
        # Objects are not looked for by project, but the client insists on one.
        client = Client(
            project=project or "none",
            credentials=credentials,
            client_options={"api_endpoint": self._endpoint} if self._endpoint else None,
        )
        return client.bucket(self._place.bucket)

    def put(self, name: str, content: bytes) -> None:
        with self._sentences():
            blob = self._bucket.blob(self._place.key(name))
            blob.upload_from_string(content, content_type="application/octet-stream", timeout=_TIMEOUT_S)

    def get(self, name: str) -> bytes:
        with self._sentences():
            found: bytes = self._bucket.blob(self._place.key(name)).download_as_bytes(timeout=_TIMEOUT_S)
            return found

    def objects(self) -> list[Stored]:
        below = self._place.key("")
        with self._sentences():
            found = self._bucket.list_blobs(prefix=below, delimiter="/", timeout=_TIMEOUT_S)
            return [Stored(blob.name.removeprefix(below), int(blob.size or 0)) for blob in found]

    def delete(self, name: str) -> None:
        with self._sentences():
            try:
                self._bucket.blob(self._place.key(name)).delete(timeout=_TIMEOUT_S)
            except NotFound:
                return

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except (GoogleAPIError, GoogleAuthError, requests.RequestException, OSError) as error:
            raise BucketError(f"{self._place.url}: {str(error).splitlines()[0][:300]}") from error
