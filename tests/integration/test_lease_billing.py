"""A home is lost, with its keys and its controller: on all three clouds the machines end themselves, and the bill with them.

The machines run the user data and the programs that they really get; the clouds are fakes that the official SDKs talk to, and
that bill what the real ones bill."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from policies.model import CapacityType
from provisioners import permissions
from provisioners.azure import termination as azure_termination
from provisioners.azure.translate import group_name
from provisioners.gcp import termination as gcp_termination
from provisioners.port.lease import FIRST_S, LEASE_S, LeaseTerms
from provisioners.port.vm import MachineOrder, MachineState
from provisioners.remote.ssh_keys import Keys, user_data
from tests.clouds.aws.aws_bench import ORDER as AWS_ORDER
from tests.clouds.aws.aws_bench import aws_bench
from tests.clouds.azure.azure_harness import OWNER as AZURE_OWNER
from tests.clouds.azure.azure_harness import azure
from tests.clouds.azure.azure_harness import order as azure_order
from tests.clouds.azure.azure_server import AzureServer
from tests.clouds.azure.azure_world import World as AzureWorld
from tests.clouds.gcp.gcp_controller import OWNER as GCP_OWNER
from tests.clouds.gcp.gcp_controller import ZONE, controller, order_of
from tests.clouds.gcp.gcp_ground import PROJECT
from tests.clouds.meter import DISK_USD_HOUR, MACHINE_USD_HOUR, Meter
from tests.clouds.switch_bench import HOUR, live

pytestmark = pytest.mark.long

KEYS = Keys(bytes(range(32)), "owner-1")
TERMS = LeaseTerms(LEASE_S, FIRST_S)
SERVED = ": >served"
LEASE_HOURS = LEASE_S // 3600
IDENTITY = (
    "/subscriptions/s/resourceGroups/g/providers/Microsoft.ManagedIdentity/userAssignedIdentities/dead-man"
)
ACCOUNT = "dead-man@acme.iam.gserviceaccount.com"
TOKEN = "machine-token"


@contextmanager
def metadata_service(responses: Mapping[str, str], header: tuple[str, str]) -> Iterator[str]:
    """The metadata of a machine, by path; without the header nothing."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = responses.get(self.path, "").encode() if self.headers.get(header[0]) == header[1] else b""
            self.send_response(200 if body else 403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def with_switch(order: MachineOrder, ending: str = "") -> MachineOrder:
    return replace(order, user_data=user_data(order, KEYS.host(order.token), TERMS, ending))


def run(program: str) -> int:
    """As the switch runs it."""
    return subprocess.run(
        [sys.executable, "-"], input=program, text=True, capture_output=True, timeout=60, check=False
    ).returncode


def hours_until_the_end(order: MachineOrder, folder: Path) -> int:
    """By the switch of the order's user data, on a machine that has served and is not needed any more. Its cloud accepts the
    deletion."""
    outcome = live(order.user_data, folder, SERVED, (LEASE_HOURS + 5) * HOUR, deletion="exit 0")
    end = outcome.deletions[0] if outcome.deletions else outcome.ended_at
    assert end is not None
    return end // HOUR


def test_on_aws_the_shutdown_ends_the_bill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order = with_switch(AWS_ORDER)
    with aws_bench(monkeypatch) as bench:
        machine = bench.fresh().create(order)
        meter = Meter(bench.world.usd_hour, bench.time.sleep)
        meter.hours(hours_until_the_end(order, tmp_path))
        before = meter.usd
        assert before >= LEASE_HOURS * MACHINE_USD_HOUR
        bench.world.shut_down(machine.id)
        bench.time.sleep(300)
        meter.usd = 0.0
        meter.hours(24 * 30)
        assert meter.usd == 0.0
        assert bench.states(bench.fresh()) == {order.token: "terminated"}


@contextmanager
def azure_machine(server: AzureServer, **options: Any) -> Iterator[tuple[MachineOrder, str]]:
    """The order of a machine that has just been made, and the program by which it ends itself."""
    world = server.world
    cloud = azure(server, dead_man_identity=IDENTITY)
    plain = azure_order(capacity_type=CapacityType.ON_DEMAND, **options)
    group = group_name(plain.owner, plain.service, "eastus")
    machine_id = f"/subscriptions/{world.subscription}/resourceGroups/{group}/providers/Microsoft.Compute/virtualMachines/{plain.token}"
    responses = {
        f"/identity/oauth2/token?api-version=2018-02-01&resource={server.url}/": json.dumps(
            {"access_token": TOKEN}
        ),
        "/instance/compute/resourceId?api-version=2021-02-01&format=text": machine_id,
    }
    with metadata_service(responses, ("Metadata", "true")) as metadata_url:
        program = azure_termination.terminate_script(server.url, metadata_url)
        order = with_switch(plain, program)
        cloud.create(order)
        world.pass_time(60)
        yield order, program


def test_on_azure_the_machine_has_itself_deleted_and_nothing_is_billed(tmp_path: Path) -> None:
    world = AzureWorld()
    world.identities[TOKEN] = json.loads(permissions.text_of("azure-machine"))["Actions"]
    with AzureServer(world).running() as server, azure_machine(server) as (order, program):
        meter = Meter(world.usd_hour, world.pass_time)
        meter.hours(hours_until_the_end(order, tmp_path))
        assert meter.usd >= LEASE_HOURS * MACHINE_USD_HOUR
        world.token = "nobody's"
        assert run(program) == 0
        world.pass_time(300)
        meter.usd = 0.0
        meter.hours(24 * 30)
        assert meter.usd == 0.0
        assert world.parts() == []
        (found,) = azure(server, token="nobody's").machines(AZURE_OWNER)
        assert found.state is MachineState.TERMINATED
    assert world.violations == []


@pytest.mark.parametrize("lost", json.loads(permissions.text_of("azure-machine"))["Actions"][:3])
def test_on_azure_each_action_of_the_machines_role_is_needed(lost: str) -> None:
    world = AzureWorld()
    actions = json.loads(permissions.text_of("azure-machine"))["Actions"]
    world.identities[TOKEN] = [action for action in actions if action != lost]
    with AzureServer(world).running() as server, azure_machine(server) as (_, program):
        assert run(program) != 0


def test_on_azure_the_role_of_a_machine_lets_it_do_nothing_else() -> None:
    world = AzureWorld()
    world.identities[TOKEN] = json.loads(permissions.text_of("azure-machine"))["Actions"]
    with AzureServer(world).running() as server:
        cloud = azure(server, token=TOKEN)
        with pytest.raises(Exception, match="AuthorizationFailed"):
            cloud.machines(AZURE_OWNER)


def test_on_azure_a_machine_without_an_identity_is_billed_after_its_end() -> None:
    """So `serve check` reports it."""
    world = AzureWorld()
    with AzureServer(world).running() as server:
        order = with_switch(azure_order(capacity_type=CapacityType.ON_DEMAND))
        azure(server).create(order)
        world.pass_time(60)
        world.switch_off(order.token)
        meter = Meter(world.usd_hour, world.pass_time)
        meter.hours(24)
        assert meter.usd > 24 * MACHINE_USD_HOUR


def test_on_google_cloud_the_machine_deletes_itself_and_no_disk_is_billed(tmp_path: Path) -> None:
    with controller() as gcp:
        world = gcp.world
        world.identities[TOKEN] = frozenset(
            yaml.safe_load(permissions.text_of("gcp-machine"))["includedPermissions"]
        )
        plain = order_of(capacity_type=CapacityType.ON_DEMAND)
        name = f"s{plain.token}"
        responses = {
            "/instance/service-accounts/default/token": json.dumps({"access_token": TOKEN}),
            "/instance/zone": f"projects/123456/zones/{ZONE.name}",
            "/instance/name": name,
            "/project/project-id": PROJECT,
        }
        with metadata_service(responses, ("Metadata-Flavor", "Google")) as metadata_url:
            program = gcp_termination.terminate_script(gcp.url, metadata_url)
            order = with_switch(plain, program)
            gcp.another(dead_man_account=ACCOUNT).create(order)
            world.advance(60)
            meter = Meter(world.usd_hour, world.advance)
            meter.hours(hours_until_the_end(order, tmp_path))
            assert meter.usd >= LEASE_HOURS * MACHINE_USD_HOUR
            world.role = frozenset()  # the home is lost
            assert run(program) == 0
        world.advance(300)
        meter.usd = 0.0
        meter.hours(24 * 30)
        assert meter.usd == 0.0
        world.role = None
        gcp.restart()
        assert all(machine.state.is_gone for machine in gcp.listed(GCP_OWNER).values())


def test_on_google_cloud_a_machine_that_only_stops_leaves_its_disk_billed() -> None:
    with controller() as gcp:
        order = order_of(capacity_type=CapacityType.ON_DEMAND)
        gcp.create(order)
        gcp.world.advance(60)
        gcp.world.stop(ZONE.name, f"s{order.token}")
        meter = Meter(gcp.world.usd_hour, gcp.world.advance)
        meter.hours(24)
        assert meter.usd == pytest.approx(24 * DISK_USD_HOUR)


def test_a_program_that_its_cloud_refuses_says_so(tmp_path: Path) -> None:
    """So that the switch tries again, and shuts the machine down in the end."""
    for program in (
        azure_termination.terminate_script("http://127.0.0.1:9", "http://127.0.0.1:9"),
        gcp_termination.terminate_script("http://127.0.0.1:9", "http://127.0.0.1:9"),
    ):
        assert run(program) != 0
