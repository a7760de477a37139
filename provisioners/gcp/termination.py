"""The program by which a machine of Google Cloud has itself deleted when its lease is over.

A machine that shuts down is not billed any more, but its disk is, as long as the instance exists. So the machine itself
calls Compute Engine, by a service account that the administrator made once (`clouds.gcp.dead_man_service_account`) and that
may delete instances (`permissions/gcp-machine.yaml`).

`scheduling.maxRunDuration` and `terminationTime` do not do: `instances.setScheduling` takes stopped instances only, so
their end cannot be moved while a machine serves.
"""

from __future__ import annotations

COMPUTE_URL = "https://compute.googleapis.com"
METADATA_URL = "http://169.254.169.254/computeMetadata/v1"


def terminate_script(compute_url: str = COMPUTE_URL, metadata_url: str = METADATA_URL) -> str:
    """Return the program for python3 (3.6 or later), without dependencies. It exits with 0 when the deletion was accepted."""
    return _ENDING.format(compute_url=compute_url.rstrip("/"), metadata_url=metadata_url)


# No proxy: neither address may go through one.
_ENDING = """\
import json, urllib.request as u
o = u.build_opener(u.ProxyHandler({{}}))
def call(url, method="GET", **headers):
    with o.open(u.Request(url, method=method, headers=headers), timeout=20) as r:
        return r.read().decode()
def get(path):
    return call("{metadata_url}/" + path, **{{"Metadata-Flavor": "Google"}})
t = json.loads(get("instance/service-accounts/default/token"))["access_token"]
z = get("instance/zone").rpartition("/")[2]
p = "/compute/v1/projects/%s/zones/%s/instances/%s" % (get("project/project-id"), z, get("instance/name"))
call("{compute_url}" + p, "DELETE", Authorization="Bearer " + t)
"""
