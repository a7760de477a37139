"""A controller on a machine of Google Cloud and of Azure, whose fakes boot real machines, as network namespaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.conftest import Serve
from tests.e2e.test_cli_deploy_aws import arguments, program  # noqa: F401 (a fixture)
from tests.e2e.test_cli_rented import NEEDS_VMS, Cloud, google, microsoft

pytestmark = [pytest.mark.long, NEEDS_VMS]

IDENTITIES = {
    "gcp": "controller@project.iam.gserviceaccount.com",
    "azure": "/subscriptions/s/resourceGroups/g/providers/Microsoft.ManagedIdentity/userAssignedIdentities/controller",
}


@pytest.fixture(params=[google, microsoft], ids=["gcp", "azure"])
def cloud(request: pytest.FixtureRequest, serve: Serve, tmp_path: Path) -> Iterator[Cloud]:
    make: Callable[[Serve, Path, ExitStack], Cloud] = request.param
    with ExitStack() as stack:
        yield make(serve, tmp_path, stack)


def test_a_machine_is_launched_found_again_and_terminated(
    serve: Serve,
    cloud: Cloud,
    program: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    words = arguments(cloud.place, program, tmp_path, IDENTITIES[cloud.name])
    words += ["--instance-type", "Standard_D2s_v5"] if cloud.name == "azure" else []
    made = serve.ok(*words, "-o", "json").json()
    context = cloud.place.replace("/", "-")
    assert (made["context"], made["started"]) == (context, True)
    billed = cloud.left()
    serve.ok("context", "use", context)
    assert serve.ok("controller", "status", "-o", "json").json()["pid"] == made["pid"]
    again = serve.ok(*words, "-o", "json")
    assert (again.json()["started"], cloud.left()) == (False, billed)
    assert "found " in again.err
    serve.ok("context", "use", "local")
    assert serve.ok("gc", "-y", "-o", "json").json()["found"] == []
    others = serve("gc", "--any-owner", "-o", "json")
    assert (others.json()["found"], "is the machine of a controller" in others.err) == ([], True), others.err
    gone = serve.ok("controller", "undeploy", cloud.place, "-y", "-o", "json").json()
    assert gone["terminated"]
    assert cloud.left() == []
