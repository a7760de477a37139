"""From a URL to the bucket that it names. A vendor's SDK is imported when a bucket of the vendor is opened."""

from __future__ import annotations

from skyserve_cli.buckets.folder import Folder
from skyserve_cli.buckets.port import Bucket, BucketError, Place


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
