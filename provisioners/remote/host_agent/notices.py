"""Notices of the machine's end, from its own metadata service: one adapter per cloud.

| cloud | preemption | maintenance that stops or takes the machine |
|---|---|---|
| AWS | IMDSv2, spot/instance-action: the instant, two minutes ahead | events/maintenance/scheduled: the instant, days ahead |
| GCP | instance/preempted, whose response comes when it changes: 30 seconds are left | instance/maintenance-event: machines with GPUs have an hour |
| Azure | scheduled events, Preempt: the instant, 30 seconds ahead or more | Reboot, Redeploy, Terminate: 5 to 15 minutes ahead or more |

Maintenance that a machine survives in seconds (Azure's Freeze, Google's live migration) is not reported. AWS's rebalance recommendation is
not read: it comes for whole pools, long before, and mostly nothing follows; Karpenter leaves it alone by default, too.

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

from provisioners.files import write_text
from provisioners.remote.host_agent.files import unix_now

METADATA = "http://169.254.169.254"
GCP_NOTICE_S = 30.0
GCP_MAINTENANCE_S = 3600.0
EVERY_S = 2.0
_MAINTENANCE_EVERY_S = 60.0
# A machine that has been rebooted has lost its secrets and its engine; `system-reboot` is of the host, `instance-reboot` of the machine.
_AWS_CODES = (
    "instance-reboot",
    "system-reboot",
    "system-maintenance",
    "instance-retirement",
    "instance-stop",
)
_AZURE_FIRST_S = 150.0  # the first request switches the service on, which takes up to two minutes


class MetadataResponse(NamedTuple):
    """`code` is 0 if there is no such service."""

    code: int
    body: str = ""
    etag: str = ""


if TYPE_CHECKING:  # Python 3.8 cannot evaluate these
    Fetch = Callable[..., MetadataResponse]
    # `preempt_at` where announced, and `retire_at`, 0.0 where nothing is, missing where that is not known; UNIX seconds
    Notice = dict[str, float]


def fetch(
    path: str, headers: Mapping[str, str], method: str = "GET", timeout_s: float = 5.0
) -> MetadataResponse:
    request = urllib.request.Request(METADATA + path, headers=dict(headers), method=method)  # noqa: S310 (http)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=timeout_s) as reply:
            return MetadataResponse(
                reply.status, reply.read().decode(errors="replace"), reply.headers.get("ETag") or ""
            )
    except urllib.error.HTTPError as error:
        return MetadataResponse(error.code)
    except OSError:
        return MetadataResponse(0)


def aws(fetch: Fetch, memory: dict[str, Any], now: float) -> Notice:
    """Return whether the machine is taken from us, by any action (terminate, stop, hibernate)."""
    token = fetch("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    if token.code != 200:
        return {}
    headers = {"X-aws-ec2-metadata-token": token.body}
    found = {}
    response = fetch("/latest/meta-data/spot/instance-action", headers)
    if response.code == 200:
        found["preempt_at"] = _utc(json.loads(response.body)["time"])
    if _is_due(memory, now):
        response = fetch("/latest/meta-data/events/maintenance/scheduled", headers)
        if response.code in (200, 404):
            events = json.loads(response.body) if response.code == 200 else []
            memory["retire_at"] = _first([_gmt(one["NotBefore"]) for one in events if _is_active(one)])
    return {**found, **_retire(memory)}


def _is_active(event: Mapping[str, Any]) -> bool:
    return event["State"] == "active" and event["Code"] in _AWS_CODES


def gcp(fetch: Fetch, memory: dict[str, Any], now: float) -> Notice:
    """Waits in the metadata service until the value changes, so that a notice is seen at once."""
    path = "/computeMetadata/v1/instance/preempted?alt=text"
    if "etag" in memory:
        path += f"&wait_for_change=true&timeout_sec=30&last_etag={memory['etag']}"
    response = fetch(path, {"Metadata-Flavor": "Google"}, timeout_s=40.0)
    if response.code == 200 and response.etag:
        memory["etag"] = response.etag
    else:
        memory.pop("etag", None)
    if response.code == 200 and response.body.strip() == "TRUE":
        memory.setdefault("heard_at", now)
    event = fetch("/computeMetadata/v1/instance/maintenance-event?alt=text", {"Metadata-Flavor": "Google"})
    if event.code == 200:
        ends = event.body.strip() == "TERMINATE_ON_HOST_MAINTENANCE"
        memory["retire_at"] = (memory.get("retire_at") or now + GCP_MAINTENANCE_S) if ends else 0.0
    found = _retire(memory)
    return {**found, "preempt_at": memory["heard_at"] + GCP_NOTICE_S} if "heard_at" in memory else found


def azure(fetch: Fetch, memory: dict[str, Any], now: float) -> Notice:
    """Return an event that has started has no NotBefore any more: it is now."""
    path = "/metadata/scheduledevents?api-version=2020-07-01"
    response = fetch(path, {"Metadata": "true"}, timeout_s=_AZURE_FIRST_S)
    if response.code != 200:
        return {}
    events = json.loads(response.body).get("Events", [])

    def times(*kinds: str) -> list[float]:
        return [
            parsedate_to_datetime(event["NotBefore"]).timestamp()
            if event.get("NotBefore")
            else memory.setdefault(event.get("EventId"), now)
            for event in events
            if event.get("EventType") in kinds
        ]

    preempted = times("Preempt")
    found = {"retire_at": _first(times("Reboot", "Redeploy", "Terminate"))}
    return {**found, "preempt_at": min(preempted)} if preempted else found


ADAPTERS: Mapping[str, Callable[[Fetch, dict[str, Any], float], Notice]] = {
    "aws": aws,
    "gcp": gcp,
    "azure": azure,
}


def watch(folder: Path, cloud: str, every_s: float = EVERY_S) -> None:
    """Keep notice.json up to date, for ever; nothing on a cloud that announces nothing."""
    adapter = ADAPTERS.get(cloud)
    memory: dict[str, Any] = {}
    written = None  # what an earlier process has written counts no more
    while adapter is not None:
        try:
            found = adapter(fetch, memory, unix_now())
            if found != written:
                write_text(folder / "notice.json", json.dumps(found))
                written = found
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            pass  # a response of another shape is no notice; a full disk may have room again later
        time.sleep(every_s)


def _retire(memory: Mapping[str, Any]) -> Notice:
    return {"retire_at": memory["retire_at"]} if "retire_at" in memory else {}


def _first(times: list[float]) -> float:
    return min(times, default=0.0)


def _is_due(memory: dict[str, Any], now: float) -> bool:
    """Return whether to look for announcements days ahead."""
    is_due = bool(now >= memory.get("look_at", 0.0))
    if is_due:
        memory["look_at"] = now + _MAINTENANCE_EVERY_S
    return is_due


def _gmt(text: str) -> float:
    """UNIX seconds of 21 Jan 2026 09:00:43 GMT."""
    return float(timegm(time.strptime(text, "%d %b %Y %H:%M:%S GMT")))


def _utc(text: str) -> float:
    """UNIX seconds of 2026-01-31T12:00:00Z."""
    return float(timegm(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S")))
