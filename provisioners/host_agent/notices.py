"""Preemption notices, from the machine's own metadata service: one adapter per cloud.

| cloud | where | what it gives |
|---|---|---|
| AWS | IMDSv2, spot/instance-action | the instant, two minutes ahead; a rebalance recommendation may come before |
| GCP | instance/preempted, answered as soon as it changes | that it begins; 30 seconds are left |
| Azure | scheduled events | the instant, 30 seconds ahead or more |

All of them are plain HTTP on a link-local address, and best effort: a machine may go without a word.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from calendar import timegm
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from provisioners.host_agent.files import unix_now, write_text

METADATA = "http://169.254.169.254"
GCP_NOTICE_S = 30.0
EVERY_S = 2.0
_AZURE_FIRST_S = 150.0  # the first request switches the service on, which takes up to two minutes


class Answer(NamedTuple):
    """`code` is 0 if there is no such service."""

    code: int
    body: str = ""
    etag: str = ""


if TYPE_CHECKING:  # Python 3.8 cannot evaluate these
    Fetch = Callable[..., Answer]
    Notice = dict[str, float]  # `preempt_at` and `rebalance_at`, UNIX seconds, where announced


def fetch(path: str, headers: Mapping[str, str], method: str = "GET", timeout_s: float = 5.0) -> Answer:
    request = urllib.request.Request(METADATA + path, headers=dict(headers), method=method)  # noqa: S310 (http)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=timeout_s) as reply:
            return Answer(
                reply.status, reply.read().decode(errors="replace"), reply.headers.get("ETag") or ""
            )
    except urllib.error.HTTPError as error:
        return Answer(error.code)
    except OSError:
        return Answer(0)


def aws(fetch: Fetch, memory: dict[str, Any], now: float) -> Notice:
    """Whatever the action (terminate, stop, hibernate), the machine is taken from us."""
    token = fetch("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    if token.code != 200:
        return {}
    headers = {"X-aws-ec2-metadata-token": token.body}
    found = {}
    for name, path, instant in (
        ("preempt_at", "spot/instance-action", "time"),
        ("rebalance_at", "events/recommendations/rebalance", "noticeTime"),
    ):
        answer = fetch(f"/latest/meta-data/{path}", headers)
        if answer.code == 200:
            found[name] = _utc(json.loads(answer.body)[instant])
    return found


def gcp(fetch: Fetch, memory: dict[str, Any], now: float) -> Notice:
    """Waits in the metadata service until the value changes, so that a notice is heard at once."""
    path = "/computeMetadata/v1/instance/preempted?alt=text"
    if "etag" in memory:
        path += f"&wait_for_change=true&timeout_sec=30&last_etag={memory['etag']}"
    answer = fetch(path, {"Metadata-Flavor": "Google"}, timeout_s=40.0)
    if answer.code == 200 and answer.etag:
        memory["etag"] = answer.etag
    else:
        memory.pop("etag", None)
    if answer.code == 200 and answer.body.strip() == "TRUE":
        memory.setdefault("heard_at", now)
    return {"preempt_at": memory["heard_at"] + GCP_NOTICE_S} if "heard_at" in memory else {}


def azure(fetch: Fetch, memory: dict[str, Any], now: float) -> Notice:
    """An event that has started has no NotBefore any more: it is now."""
    path = "/metadata/scheduledevents?api-version=2020-07-01"
    answer = fetch(path, {"Metadata": "true"}, timeout_s=_AZURE_FIRST_S)
    if answer.code != 200:
        return {}
    times = [
        parsedate_to_datetime(event["NotBefore"]).timestamp()
        if event.get("NotBefore")
        else memory.setdefault(event.get("EventId"), now)
        for event in json.loads(answer.body).get("Events", [])
        if event.get("EventType") == "Preempt"
    ]
    return {"preempt_at": min(times)} if times else {}


ADAPTERS: Mapping[str, Callable[[Fetch, dict[str, Any], float], Notice]] = {
    "aws": aws,
    "gcp": gcp,
    "azure": azure,
}


def watch(folder: Path, cloud: str, every_s: float = EVERY_S) -> None:
    """Keep notice.json up to date, for ever; nothing on a cloud that announces nothing."""
    adapter = ADAPTERS.get(cloud)
    memory: dict[str, Any] = {}
    told: Notice = {}
    while adapter is not None:
        try:
            found = adapter(fetch, memory, unix_now())
            if found != told:
                write_text(folder / "notice.json", json.dumps(found))
                told = found
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            pass  # an answer of another shape is no notice; a full disk may have room again later
        time.sleep(every_s)


def _utc(text: str) -> float:
    """UNIX seconds of 2026-01-31T12:00:00Z."""
    return float(timegm(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S")))
