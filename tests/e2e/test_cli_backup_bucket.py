"""The controller's host is lost, and its services are adopted by a controller that was restored from a bucket."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
from moto.server import ThreadedMotoServer

from tests.clouds.schedules import only_long

pytestmark = pytest.mark.long

FILE = """
name: chat
service: {readiness_probe: /health, replicas: 2}
resources: {infra: local}
secrets: {TOKEN: hunter2}
run: serve engine --profile l4-8b --speed 50 --port $SKYSERVE_REPLICA_PORT
"""
URL = "s3://box-1/prod"


@pytest.fixture
def bucket(serve: Any) -> Iterator[Any]:
    """The objects of the bucket, and the configuration that names it."""
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    keys = {
        "AWS_ACCESS_KEY_ID": "AKIATEST",
        "AWS_SECRET_ACCESS_KEY": "of-nobody",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    url = "http://{}:{}".format(*server.get_host_and_port())
    urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset", method="POST"), timeout=10).close()
    serve.environment |= {**keys, "AWS_ENDPOINT_URL_S3": url, "AWS_EC2_METADATA_DISABLED": "true"}
    client = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="AKIATEST",
        aws_secret_access_key="of-nobody",
    )
    client.create_bucket(Bucket="box-1")
    yield client
    server.stop()


@pytest.fixture
def passphrase(tmp_path: Path) -> Path:
    file = tmp_path / "passphrase"
    file.write_text("correct horse\n")
    return file


def names(bucket: Any) -> list[str]:
    return [each["Key"] for each in bucket.list_objects_v2(Bucket="box-1").get("Contents", [])]


def configure(serve: Any, passphrase: Path, **more: Any) -> None:
    serve.configure(controller={"backup": {"to": URL, "passphrase_file": str(passphrase), **more}})


def replicas(serve: Any) -> list[tuple[int, str, str]]:
    return [(one["id"], one["state"], one["endpoint"]) for one in serve.view("chat")["replicas"]]


def is_controller(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
        return "skyserve_cli.controller" in " ".join(process.cmdline())
    return False


def lose(serve: Any, lost: Path) -> None:
    """Kill the controller and take its home away, all but what stands for machines elsewhere."""
    for process in serve.processes():
        with suppress(psutil.Error):
            if is_controller(process):
                os.kill(process.pid, signal.SIGKILL)
    serve.home.rename(lost)
    serve.home.mkdir()
    for name in ("local", "lb"):
        (lost / name).rename(serve.home / name)


def test_a_lost_home_is_restored_from_the_bucket_and_no_replica_is_launched_or_terminated(
    serve: Any, bucket: Any, passphrase: Path, tmp_path: Path
) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(FILE)
    configure(serve, passphrase, every_hours=0.002, keep=2)
    serve.ok("up", file, "-y")
    before = replicas(serve)
    assert [state for _, state, _ in before] == ["READY", "READY"]
    made = len(names(bucket))
    serve.eventually(lambda: made == 0 or len(names(bucket)) == 2)
    last = serve.ok("controller", "backup", env={"AWS_MAX_ATTEMPTS": "1"})
    assert f"wrote {URL}/skyserve-" in last.err
    shown = serve.ok("controller", "status").out
    assert f", in {URL}" in shown
    assert f"controller.backup: {URL} has " in serve.ok("check").err
    body = bucket.get_object(Bucket="box-1", Key=names(bucket)[-1])["Body"].read()
    assert b"hunter2" not in body
    assert b"machines.key" not in body

    lose(serve, tmp_path / "lost")
    serve.eventually(lambda: not any(map(is_controller, serve.processes())))
    listed = serve.ok("controller", "restore", URL, "--list", "-o", "json").json()
    assert [f"prod/{each['name']}" for each in reversed(listed)] == sorted(names(bucket))
    sealed = serve("controller", "restore", URL)
    assert (sealed.code, "--passphrase-file" in sealed.err) == (2, True)
    restored = serve.ok("controller", "restore", URL, "--passphrase-file", passphrase)
    assert f"reading {URL}/{listed[0]['name']}" in restored.err
    assert "1 services" in restored.err
    serve.ok("controller", "start")
    serve.eventually(lambda: not (serve.home / "restored.json").exists())
    serve.eventually(lambda: replicas(serve) == before)
    events = serve.ok("events", "chat", "-o", "json").out
    lines = [json.loads(line) for line in events.splitlines()] if events[0] != "[" else json.loads(events)
    assert [line for line in lines if line["state"] in ("TERMINATING", "GONE")] == []
    assert {line["replica_id"] for line in lines} <= {None, 1, 2}
    # A backup does not have the event of itself; the next one is made soon.
    serve.eventually(lambda: "backup" in serve.ok("events").out)


@only_long  # test_bucket_backup has failures without processes
def test_a_bucket_that_refuses_is_shown_and_the_services_go_on(
    serve: Any, bucket: Any, passphrase: Path, tmp_path: Path
) -> None:
    bucket.delete_bucket(Bucket="box-1")
    configure(serve, passphrase)
    serve.ok("controller", "start")
    serve.eventually(lambda: "NoSuchBucket" in serve.ok("controller", "status").out)
    assert (
        f"no backup in {URL} yet; the last attempt failed: {URL}: NoSuchBucket"
        in serve.ok("controller", "status").out
    )
    assert "controller.backup: not usable" in serve("check").err
    serve.eventually(lambda: "no backup is made" in serve.ok("events").out)
    refused = serve("controller", "backup")
    assert (refused.code, "NoSuchBucket" in refused.err) == (1, True)
    wrong = serve("controller", "backup", "s3://Bad", "--passphrase-file", passphrase)
    assert (wrong.code, "is no place for objects" in wrong.err) == (2, True)
    assert "the newest" not in serve("controller", "restore", URL, "--list").err
    bucket.create_bucket(Bucket="box-1")
    assert "there is no backup in" in serve_stopped(serve, passphrase)


def serve_stopped(serve: Any, passphrase: Path) -> str:
    serve.ok("controller", "stop")
    said = serve("controller", "restore", URL, "--passphrase-file", passphrase)
    assert said.code == 1
    return str(said.err)
