"""The vendors' SDKs against S3 of moto, and small servers with the routes of Google's and Azure's object stores."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

import boto3
import pytest
from google.auth.credentials import AnonymousCredentials
from moto.server import ThreadedMotoServer

from skyserve_cli.buckets.azure import AzureBucket
from skyserve_cli.buckets.gcs import GcsBucket
from skyserve_cli.buckets.opening import bucket_at
from skyserve_cli.buckets.port import Bucket, BucketError, place_of


class _Store(BaseHTTPRequestHandler):
    """`objects` are those of the server's one bucket, which is named `box`."""

    objects: dict[str, bytes]

    def log_message(self, *_: Any) -> None: ...

    def reply(self, status: int, body: bytes, kind: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))


class Gcs(_Store):
    def do_POST(self) -> None:
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        meta, content = cast(Any, BytesParser().parsebytes(head + self.body())).get_payload()
        name = json.loads(meta.get_payload())["name"]
        self.objects[name] = content.get_payload(decode=True)
        self.reply(200, json.dumps({"name": name, "bucket": "box"}).encode(), "application/json")

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {key: value[0] for key, value in parse_qs(url.query).items()}
        if url.path.endswith("/o"):
            prefix = query.get("prefix", "")
            found = sorted(name for name in self.objects if name.startswith(prefix))
            items = [
                {"name": n, "size": str(len(self.objects[n]))} for n in found if "/" not in n[len(prefix) :]
            ]
            first = int(query.get("pageToken", 0))
            more = {"nextPageToken": str(first + 1)} if first + 1 < len(items) else {}
            page = {"items": items[first : first + 1], **more}
            return self.reply(200, json.dumps(page).encode(), "application/json")
        content = self.objects.get(unquote(url.path.rpartition("/o/")[2]))
        if content is None:
            return self.reply(404, b"no such object", "text/plain")
        return self.reply(200, content, "application/octet-stream")

    def do_DELETE(self) -> None:
        gone = self.objects.pop(unquote(self.path.rpartition("/o/")[2].partition("?")[0]), None)
        self.reply(404 if gone is None else 204, b"", "text/plain")


class Azure(_Store):
    def name(self) -> str:
        return unquote(urlsplit(self.path).path.partition("/box/")[2])

    def do_PUT(self) -> None:
        assert self.headers["x-ms-blob-type"] == "BlockBlob"
        assert "comp=block" not in self.path, "one Put Blob is atomic"
        self.objects[self.name()] = self.body()
        stamp = "Thu, 26 Nov 2026 00:00:00 GMT"
        self.reply(
            201, b"", "text/plain", ETag='"1"', Last_Modified=stamp, x_ms_request_server_encrypted="true"
        )

    def do_GET(self) -> None:
        query = {key: value[0] for key, value in parse_qs(urlsplit(self.path).query).items()}
        if query.get("comp") == "list":
            found = sorted(n for n in self.objects if n.startswith(query.get("prefix", "")))
            blobs = "".join(
                f"<Blob><Name>{n}</Name><Properties><Content-Length>{len(self.objects[n])}</Content-Length>"
                "<BlobType>BlockBlob</BlobType></Properties></Blob>"
                for n in found
            )
            text = f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker /></EnumerationResults>"
            return self.reply(200, text.encode(), "application/xml")
        content = self.objects.get(self.name())
        if content is None:
            return self.reply(404, b"", "text/plain", x_ms_error_code="BlobNotFound")
        first, last = map(int, re.findall(r"\d+", self.headers["x-ms-range"])[:2])
        part = content[first : last + 1]
        return self.reply(
            206,
            part,
            "application/octet-stream",
            Content_Range=f"bytes {first}-{first + len(part) - 1}/{len(content)}",
            ETag='"1"',
            Last_Modified="Thu, 26 Nov 2026 00:00:00 GMT",
            x_ms_blob_type="BlockBlob",
        )

    def do_DELETE(self) -> None:
        gone = self.objects.pop(self.name(), None)
        if gone is None:
            self.reply(404, b"", "text/plain", x_ms_error_code="BlobNotFound")
        else:
            self.reply(202, b"", "text/plain")


@contextmanager
def serving(kind: type[_Store]) -> Iterator[str]:
    handler = type(kind.__name__, (kind,), {"objects": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a server with the bucket `box-1`."""
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    for name, value in {
        "AWS_ENDPOINT_URL_S3": url,
        "AWS_ACCESS_KEY_ID": "AKIATEST",
        "AWS_SECRET_ACCESS_KEY": "of-nobody",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="box-1")
    yield url
    server.stop()


def insist_it_keeps_objects(at: Bucket, beside: Bucket) -> None:
    """`beside` is another prefix of the same bucket, which begins with the same letters."""
    beside.put("other", b"x")
    assert at.objects() == []
    at.put("one", b"1")
    at.put("one", b"22" * 70_000)
    at.put("two", b"2")
    assert {each.name: each.size for each in at.objects()} == {"one": 140_000, "two": 1}
    assert at.get("one") == b"22" * 70_000
    at.delete("one")
    at.delete("one")
    assert [each.name for each in at.objects()] == ["two"]
    with pytest.raises(BucketError):
        at.get("one")
    assert [each.name for each in beside.objects()] == ["other"]


def test_s3(s3: str) -> None:
    insist_it_keeps_objects(bucket_at(place_of("s3://box-1/a")), bucket_at(place_of("s3://box-1/ab")))
    with pytest.raises(BucketError, match="s3://box-2: NoSuchBucket: The specified bucket does not exist"):
        bucket_at(place_of("s3://box-2")).objects()


def test_s3_without_credentials_is_one_sentence(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    with pytest.raises(BucketError, match="s3://box-1: Unable to locate credentials"):
        bucket_at(place_of("s3://box-1")).objects()


def test_google_cloud_storage() -> None:
    with serving(Gcs) as url:
        at, beside = (
            GcsBucket(place_of(f"gs://box/{prefix}"), AnonymousCredentials(), url) for prefix in ("a", "ab")
        )
        insist_it_keeps_objects(at, beside)


def test_azure_blob_storage() -> None:
    with serving(Azure) as url:
        at, beside = (
            AzureBucket(
                place_of(f"https://account.blob.core.windows.net/box/{prefix}"),
                cast(Any, "a2V5"),
                f"{url}/account",
            )
            for prefix in ("a", "ab")
        )
        insist_it_keeps_objects(at, beside)


PUT = """
import sys
from skyserve_cli.buckets.opening import bucket_at
from skyserve_cli.buckets.port import place_of

bucket_at(place_of("s3://box-1/killed")).put("one", b"x" * 5_000_000)
"""


def test_a_controller_that_is_killed_in_an_upload_leaves_no_object(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy passes half of the request on, and no more until the process that sends it is dead."""
    upstream = (urlsplit(s3).hostname or "", urlsplit(s3).port or 0)
    listener = socket.create_server(("127.0.0.1", 0))
    environment = {**os.environ, "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{listener.getsockname()[1]}"}
    with subprocess.Popen([sys.executable, "-c", PUT], env=environment) as sender:
        client, _ = listener.accept()
        with client, socket.create_connection(upstream) as server:
            passed = 0
            while passed < 2_500_000:
                piece = client.recv(65536)
                if b"100-continue" in piece:
                    client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                server.sendall(piece)
                passed += len(piece)
            sender.kill()
            sender.wait()
    listener.close()
    at = bucket_at(place_of("s3://box-1/killed"))
    at.put("later", b"")  # the server has read on
    assert [each.name for each in at.objects()] == ["later"]
