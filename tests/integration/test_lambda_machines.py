"""Lambda's machines against a server that is as strict as its API's description: launches without tokens, the firewall, errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from policies.model import CapacityType, Scope, Zone
from provisioners.lambda_labs.api import LambdaApi
from provisioners.lambda_labs.machines import LambdaMachines
from provisioners.lambda_labs.prices import REGIONS
from provisioners.port.base import Candidate
from provisioners.port.errors import (
    AuthError,
    CapacityError,
    InvalidRequestError,
    ProvisionError,
    QuotaError,
    RefusedError,
    TransientError,
)
from provisioners.port.firewall import FirewallAccess
from provisioners.port.vm import Level, MachineOrder, MachineState
from skyserve_cli.clouds import Clouds
from skyserve_cli.config import load_config
from skyserve_cli.home import Home
from tests.clouds.lambda_labs.lambda_world import KEY, ApiError, LambdaWorld, serving

EAST = Zone("lambda", "us-east-1", "us-east-1")
ORDER = MachineOrder(
    token="own-chat-1-0123456789",
    owner="own",
    service="chat",
    replica_id=1,
    rank=0,
    num_nodes=1,
    zone=EAST,
    instance_type="gpu_1x_h100_sxm5",
    capacity_type=CapacityType.ON_DEMAND,
    public_key="ssh-ed25519 AAAA own",
    user_data="#!/bin/sh\ntrue\n",
    ports=(8443,),
)


class Bench:
    def __init__(self, url: str, world: LambdaWorld, folder: Path) -> None:
        self.url, self.world = url, world
        self.key_file = folder / "lambda_keys"
        self.key_file.write_text(f"api_key = {KEY}\n")

    def pass_time(self, seconds: float) -> None:
        with self.world.lock:
            self.world.time += seconds

    def fresh(self) -> LambdaMachines:
        """As after a restart."""

        def now() -> float:
            return self.world.time

        api = LambdaApi(self.url, str(self.key_file), now=now, sleep=self.pass_time)
        return LambdaMachines(api, frozenset(REGIONS), now=now)

    def launches(self) -> int:
        return sum(path.endswith("/launch") for _, path in self.world.calls)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    world = LambdaWorld()
    with serving(world) as url:
        yield Bench(url, world, tmp_path)


# Launches without idempotency tokens.


def test_what_was_sent_and_is_not_listed_yet_is_not_sent_again(bench: Bench) -> None:
    machines = bench.fresh()
    bench.world.cut = True
    with pytest.raises(TransientError):
        machines.create(ORDER)
    bench.world.cut = False
    (hidden,) = bench.world.instances.items()
    bench.world.instances.clear()  # its lists are late
    with pytest.raises(TransientError, match="waiting to see whether it was done") as caught:
        machines.create(ORDER)
    assert 0 < caught.value.retry_after_s <= 60
    bench.world.instances.update([hidden])
    assert machines.create(ORDER).id == hidden[0]
    assert bench.launches() == 1


def test_what_never_came_to_be_is_sent_again_after_a_minute(bench: Bench) -> None:
    machines = bench.fresh()
    bench.world.cut = True
    with pytest.raises(TransientError):
        machines.create(ORDER)
    bench.world.cut = False
    bench.world.instances.clear()
    bench.pass_time(61.0)
    assert machines.create(ORDER).state is MachineState.PENDING
    assert (bench.launches(), len(bench.world.living())) == (2, 1)


def test_of_two_instances_of_one_name_one_is_the_machine_and_the_other_is_left_over(bench: Bench) -> None:
    first = bench.fresh().create(ORDER)
    hidden = dict(bench.world.instances)
    bench.world.instances.clear()
    bench.pass_time(20.0)
    second = bench.fresh().create(ORDER)  # a controller that had died in between
    bench.world.instances.update(hidden)
    machines = bench.fresh()
    assert [one.id for one in machines.machines("own")] == [first.id]
    (left,) = machines.orphans("own")
    assert (left.id, left.token, left.region) == (second.id, ORDER.token, "us-east-1")
    machines.remove(left)
    machines.remove(left)
    assert machines.orphans("own") == []
    assert [one["id"] for one in bench.world.living()] == [first.id]


def test_an_instance_that_vanished_is_told_as_gone_for_an_hour(bench: Bench) -> None:
    machines = bench.fresh()
    machine = machines.create(ORDER)
    bench.world.instances.clear()
    assert [one.state for one in machines.machines("own")] == [MachineState.PENDING]  # it may be listed late
    bench.pass_time(61.0)
    (gone,) = machines.machines("own")
    assert (gone.id, gone.state, gone.message) == (
        machine.id,
        MachineState.TERMINATED,
        "lambda does not list it any more",
    )
    assert machines.create(ORDER).id == machine.id
    bench.pass_time(3601.0)
    assert machines.machines("own") == []


def test_what_others_have_in_the_account_is_left_alone(bench: Bench) -> None:
    machines = bench.fresh()
    machines.create(ORDER)
    others = replace(ORDER, owner="other", token="other-chat-1-0123456789")
    machines.create(others)
    bench.world.instances["f" * 32] = {
        **next(iter(bench.world.instances.values())),
        "id": "f" * 32,
        "name": "mine",
    }
    bench.world.since["f" * 32] = bench.world.time
    assert [one.token for one in machines.machines("own")] == [ORDER.token]
    assert machines.orphans("own") == []


# The firewall.


def opened(bench: Bench) -> set[tuple[int, str]]:
    (rules,) = [one["rules"] for one in bench.world.rulesets.values()]
    return {(one["port_range"][0], one["source_network"]) for one in rules}


def test_rules_follow_the_controller_and_the_load_balancers(bench: Bench) -> None:
    machines = bench.fresh()
    machines.admit("own", FirewallAccess(frozenset({"198.51.100.1/32"})))
    machines.create(ORDER)
    assert opened(bench) == {(22, "198.51.100.1/32"), (8443, "198.51.100.1/32")}
    access = FirewallAccess(frozenset({"198.51.100.2/32"}), {"chat": frozenset({"192.0.2.7/32"})})
    machines.admit("own", access)
    assert opened(bench) == {
        (22, "198.51.100.2/32"),
        (8443, "192.0.2.7/32"),
        (8443, "198.51.100.2/32"),
    }
    patched = [call for call in bench.world.calls if call[0] == "PATCH"]
    bench.fresh().admit("own", access)
    assert [call for call in bench.world.calls if call[0] == "PATCH"] == patched


def test_machines_of_a_service_share_a_ruleset_and_all_of_it_can_be_removed(bench: Bench) -> None:
    machines = bench.fresh()
    one, two = (
        machines.create(replace(ORDER, token=f"own-chat-{number}-0123456789", replica_id=number))
        for number in (1, 2)
    )
    assert [left.kind for left in machines.shared("own")] == ["firewall ruleset", "ssh key"]
    assert "firewall-ruleset-in-use" in machines.delete_shared("own")[0]
    for machine in (one, two):
        machines.destroy(machine)
    assert machines.delete_shared("own") == []
    assert machines.shared("own") == []
    assert machines.delete_shared("own") == []


# Errors.

LAUNCH = "instance-operations/launch"
ROWS = [
    (ApiError(400, f"{LAUNCH}/insufficient-capacity"), CapacityError, None),
    (ApiError(400, "global/quota-exceeded"), QuotaError, Scope.CLOUD),
    (ApiError(403, "global/account-inactive"), AuthError, Scope.CLOUD),
    (ApiError(403, "something-new"), AuthError, Scope.CLOUD),
    (ApiError(400, "global/invalid-parameters", "bad image"), RefusedError, None),
    (ApiError(404, "global/object-does-not-exist", "image"), RefusedError, None),
    (ApiError(400, "something-new"), RefusedError, None),
    (ApiError(429, "global/rate-limited"), TransientError, None),
    (ApiError(500, "global/internal-error"), TransientError, None),
    (ApiError(413, "too-large"), InvalidRequestError, None),
]


@pytest.mark.parametrize(("refusal", "kind", "scope"), ROWS, ids=lambda one: getattr(one, "code", None))
def test_a_refusal_is_told_by_what_to_do_next(
    bench: Bench, refusal: ApiError, kind: type[ProvisionError], scope: Scope | None
) -> None:
    bench.world.refusal = refusal
    with pytest.raises(ProvisionError) as caught:
        bench.fresh().create(ORDER)
    assert (type(caught.value), caught.value.scope, caught.value.code) == (kind, scope, refusal.code)
    assert caught.value.zone == EAST
    assert bench.world.living() == []


@pytest.mark.parametrize("text", ["", "api_key =\n", "two words\n", None])
def test_a_key_file_without_a_key_says_so_and_the_key_is_never_shown(bench: Bench, text: str | None) -> None:
    bench.key_file.unlink()
    if text is not None:
        bench.key_file.write_text(text)
    with pytest.raises(AuthError) as caught:
        bench.fresh().machines("own")
    assert str(bench.key_file) in caught.value.message
    bench.key_file.write_text(KEY[:-1] + "x")
    (found,) = bench.fresh().check()
    assert (found.level, "global/invalid-api-key" in found.message) == (Level.MISSING, True)
    assert KEY[:-1] not in found.message


def test_the_key_does_not_follow_a_redirect(bench: Bench) -> None:
    seen: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(302)
            self.send_header("Location", f"{bench.url}/instances")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = threading.Thread(target=server.handle_request, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        api = LambdaApi(url, str(bench.key_file), now=lambda: bench.world.time, sleep=bench.pass_time)
        with pytest.raises(ProvisionError):
            api.get("/instances")
        thread.join()
    assert seen == ["/instances"]
    assert bench.world.calls == []


def test_launches_are_paced_as_lambda_wants_them(bench: Bench) -> None:
    machines = bench.fresh()
    for number in range(1, 6):
        machines.create(replace(ORDER, token=f"own-chat-{number}-0123456789", replica_id=number))
    assert (bench.launches(), len(bench.world.living())) == (5, 5)


def test_the_check_names_a_firewall_that_is_open_to_any_address(bench: Bench) -> None:
    assert [one.level for one in bench.fresh().check()] == [Level.FINE]
    bench.world.open_globally = True
    assert [(one.what, one.level) for one in bench.fresh().check()][1:] == [("firewall", Level.NOTE)]


# As users see it.


def test_spot_is_not_offered_and_the_reason_is_said(tmp_path: Path) -> None:
    home = Home.from_environment({"SKYSERVE_HOME": str(tmp_path)})
    home.create()
    home.config.write_text("clouds: {lambda: {}}\n")
    clouds = Clouds(home, load_config(home.config))
    why = clouds.explain_no_offer(Candidate(cloud="lambda", accelerator="H100", use_spot=True))
    assert str(why) == "lambda has no spot machines; set use_spot: false"
    assert clouds.explain_no_offer(Candidate(cloud="lambda", accelerator="H100")) is None
