"""S3, and stores with its API, by boto3.

Credentials, region and endpoint are those that boto3 finds: variables, ~/.aws, or the role of the machine. A store that is not
Amazon's is named by AWS_ENDPOINT_URL_S3, or by `endpoint_url` in ~/.aws/config. An object is stored by one PutObject, which is
atomic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from skyserve_cli.buckets.port import BucketError, Place, Stored

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_CONFIG = Config(
    retries={"mode": "standard", "total_max_attempts": 3},
    connect_timeout=10,
    read_timeout=60,
    user_agent_extra="skyserve",
)


class S3Bucket:
    """See `port.Bucket`."""

    def __init__(self, place: Place, profile: str | None) -> None:
        self._place = place
        self._profile = profile

    @cached_property
    def _client(self) -> S3Client:
        return boto3.Session(profile_name=self._profile).client("s3", config=_CONFIG)

    def put(self, name: str, content: bytes) -> None:
        with self._sentences():
            self._client.put_object(Bucket=self._place.bucket, Key=self._place.key(name), Body=content)

    def get(self, name: str) -> bytes:
        with self._sentences():
            found = self._client.get_object(Bucket=self._place.bucket, Key=self._place.key(name))
            return found["Body"].read()

    def objects(self) -> list[Stored]:
        below = self._place.key("")
        with self._sentences():
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._place.bucket, Prefix=below, Delimiter="/"
            )
            return [
                Stored(each["Key"].removeprefix(below), each["Size"])
                for page in pages
                for each in page.get("Contents", [])
            ]

    def delete(self, name: str) -> None:
        with self._sentences():
            self._client.delete_object(Bucket=self._place.bucket, Key=self._place.key(name))

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            found = error.response.get("Error", {})
            code, message = found.get("Code", "?"), found.get("Message", "")
            raise BucketError(f"{self._place.url}: {code}: {message}") from error
        except (BotoCoreError, OSError) as error:
            raise BucketError(f"{self._place.url}: {error}") from error
