"""The program by which a machine of Azure has itself deleted when its lease is over.

A machine that shuts down is "stopped" on Azure, and billed as if it ran. Only Resource Manager can stop the bill, so the
machine itself calls it, by an identity that the administrator made once (`clouds.azure.dead_man_identity`) and that may
delete machines and what goes with them (`permissions/azure-machine.json`). Why not otherwise:

* An auto-shutdown schedule (`Microsoft.DevTestLab/schedules`) recurs daily. Its time must be moved on within 24 hours, which
  only a controller could do: a machine that serves for three days without one would be taken. It also leaves the disk.
* A system-assigned identity needs a role assignment for each machine: the controller would have to be allowed to grant
  roles, which is worth more than all machines.

The call needs no home, no key and no controller.
"""

from __future__ import annotations

ARM_URL = "https://management.azure.com"
METADATA_URL = "http://169.254.169.254/metadata"  # the same address on all machines
_API_VERSION = "2024-07-01"  # of Microsoft.Compute


def terminate_script(arm_url: str = ARM_URL, metadata_url: str = METADATA_URL) -> str:
    """Return the program for python3 (3.6 or later), without dependencies.

    It exits with 0 when Azure has accepted the deletion.
    """
    return _ENDING.format(arm_url=arm_url.rstrip("/"), metadata_url=metadata_url, api_version=_API_VERSION)


# No proxy: neither address may go through one. Without `client_id` the token is that of the machine's only identity.
_ENDING = """\
import json, urllib.request as u
o = u.build_opener(u.ProxyHandler({{}}))
def call(url, method="GET", **headers):
    with o.open(u.Request(url, method=method, headers=headers), timeout=20) as r:
        return r.read().decode()
m, a = "{metadata_url}", "{arm_url}"
t = json.loads(call(m + "/identity/oauth2/token?api-version=2018-02-01&resource=" + a + "/", Metadata="true"))
i = call(m + "/instance/compute/resourceId?api-version=2021-02-01&format=text", Metadata="true")
q = "?api-version={api_version}&forceDeletion=true"
call(a + i + q, "DELETE", Authorization="Bearer " + t["access_token"])
"""
