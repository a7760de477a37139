"""The API as an operator of one service calls it, with specs that no service file says.

Each is refused with the path of the key, or stored and read back as it was sent. SKYSERVE_SENT_SPECS is how many drawn ones are sent.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyserve_cli.controller.balancers.local_fleet import LocalFleet
from skyserve_cli.controller.dashboard.part import DashboardPart
from skyserve_cli.controller.secret_box import SecretBox
from skyserve_cli.home import Home
from skyserve_cli.spec import reference_text, sent_spec, spec_from_json, spec_to_json
from skyserve_cli.spec.load import load_text
from tests.integration.test_controller_api import Controller, free_port
from tests.integration.test_controller_team import AWAY, call, token

EXAMPLES = int(os.environ.get("SKYSERVE_SENT_SPECS", "40"))
SMALL = "name: alpha\nservice: {replicas: 2}\nresources: {infra: ssh/lab}\nrun: x\n"
SPEC = spec_to_json(load_text(SMALL).spec)
FULL = {
    **spec_to_json(load_text(reference_text(), name="alpha").spec),
    **{key: SPEC[key] for key in ("resources", "workdir", "file_mounts", "tls", "event_callback", "secrets")},
    **{key: SPEC[key] for key in ("probe", "regional", "residency")},
}
FULL["replica_policy"] = {
    **FULL["replica_policy"],
    **{key: SPEC["replica_policy"][key] for key in ("spot_placer", "dynamic_ondemand_fallback")},
}
FULL["load_balancer"] = {**FULL["load_balancer"], "port": None, "access": SPEC["load_balancer"]["access"]}


@asynccontextmanager
async def running(folder: Path, config: str = AWAY) -> AsyncIterator[tuple[Controller, str]]:
    """A controller, and the token of an operator of alpha alone."""
    home = Home.from_environment({"SKYSERVE_HOME": str(folder)})
    home.create()
    home.config.write_text(config)
    first = free_port()
    fleet = LocalFleet(home.load_balancers, asyncio.get_running_loop(), lambda: None)
    controller = Controller(home, fleet, range(first, first + 20), home.config)
    await controller.server.start_server()
    yield controller, await token(controller, "oa", "operator", ["alpha"])
    await controller.session.close()
    await controller.server.close()
    controller.store.close()


@pytest.fixture
async def controller(tmp_path: Path) -> AsyncIterator[tuple[Controller, str]]:
    async with running(tmp_path) as found:
        yield found


async def put(
    controller: Controller, held: str, spec: object, name: str = "alpha", mode: str | None = None
) -> tuple[int, Any]:
    """As any program may write it: with NaN, and whatever else `json` lets through."""
    headers = {"Authorization": f"Bearer {held}", "Content-Type": "application/json"}
    url = controller.server.make_url(f"/v1/services/{name}")
    body = json.dumps({"spec": spec, "mode": mode})
    async with controller.session.put(url, data=body.encode(), headers=headers) as response:
        return response.status, await response.json()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a name of another": ({"name": "beta"}, 'name: must be the name in the path, "alpha" (got "beta")'),
    "no machine": ({"resources": []}, "resources: "),
    "ports below zero": ({"port": -5, "ports": [-5]}, "port: "),
    "many replicas": (
        {"replica_policy": {"min_replicas": 10**9, "max_replicas": 10**9}},
        "replica_policy.min_replicas: ",
    ),
    "nodes below zero": ({"num_nodes": -1000}, "num_nodes: "),
    "many nodes": ({"num_nodes": 10**9}, "num_nodes: "),
    "no budget": ({"replica_policy": {"max_usd_hour": float("nan")}}, "replica_policy.max_usd_hour: "),
    "a second header": ({"probe": {"path": "/x HTTP/1.1\r\nA: b"}}, "probe.path: "),
    "no pause": ({"probe": {"interval_s": 0}}, "probe.interval_s: "),
    "a pause that is none": ({"probe": {"interval_s": float("nan")}}, "probe.interval_s: "),
    "a surge below zero": ({"update": {"max_surge": -3}}, "update.max_surge: "),
    "a port too high": ({"load_balancer": {"port": 70_000}}, "load_balancer.port: must be at most 65535"),
    "a host that is none": ({"load_balancer": {"host": "x\r\ny"}}, "load_balancer.host: must be an address"),
    "the pill": ({"drain_timeout_s": float("nan")}, "drain_timeout_s: must be a finite number (got NaN)"),
}


@pytest.mark.parametrize(("keys", "says"), REFUSED.values(), ids=REFUSED)
async def test_what_only_the_client_refused(
    controller: tuple[Controller, str], keys: dict[str, Any], says: str
) -> None:
    here, held = controller
    status, answer = await put(here, held, {**SPEC, **keys})
    assert (status, answer["error"][: len(says)]) == (400, says)
    if "name" not in keys:
        body = {"spec": {**SPEC, **keys}}
        status, _ = await call(here, held, "POST", "/v1/plan", json.loads(json.dumps(body)))
        assert status == 400
    assert here.store.services(down=True) == []


async def test_a_key_that_appears_twice(controller: tuple[Controller, str]) -> None:
    here, held = controller
    body = json.dumps({"spec": SPEC}).replace('"num_nodes": 1', '"num_nodes": 1, "num_nodes": 2')
    headers = {"Authorization": f"Bearer {held}"}
    status, content, _ = await here.raw("PUT", "/v1/services/alpha", data=body, headers=headers)
    assert (status, json.loads(content)) == (400, {"error": "num_nodes: appears twice"})


async def test_a_port_of_the_host_needs_an_admin(controller: tuple[Controller, str]) -> None:
    here, held = controller
    low = {**SPEC, "load_balancer": {"port": 22}}
    status, answer = await put(here, held, low)
    assert (status, answer["error"].partition(":")[0]) == (403, "load_balancer.port")
    status, _ = await put(here, held, {**SPEC, "load_balancer": {"port": free_port()}})
    assert status == 200


async def test_the_page_is_moved_by_the_owner_alone(
    controller: tuple[Controller, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, held = controller
    moved: list[int | None] = []

    async def page(port: int | None) -> dict[str, Any]:
        moved.append(port)
        return {"url": "http://127.0.0.1:1/#x"}

    part = next(part for part in here.parts._parts if isinstance(part, DashboardPart))
    monkeypatch.setattr(part._page, "code", page)
    admin = await token(here, "eve", "admin")
    for each in (held, admin):
        status, answer = await call(here, each, "POST", "/v1/dashboard", {"port": 8300})
        assert (status, "the owner's to choose" in answer["error"]) == (403, True)
        assert (await call(here, each, "POST", "/v1/dashboard", {}))[0] == 200
    assert (await here.call("POST", "/v1/dashboard", {"port": 8300}))[0] == 200
    assert moved == [None, None, 8300]
    for port in (0, 70_000, "x", True):
        status, answer = await here.call("POST", "/v1/dashboard", {"port": port})
        assert (status, answer["error"]) == (400, "port: must be null or a whole number from 1 to 65535")


async def test_a_failure_has_an_id_that_is_in_the_log(
    controller: tuple[Controller, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here, _ = controller

    def fail() -> dict[str, Any]:
        raise OverflowError("secret of the inside")

    monkeypatch.setattr(here.controller_service, "health", fail)
    with caplog.at_level(logging.ERROR):
        status, answer = await here.call("GET", "/v1/health")
    found = re.fullmatch(r"the controller failed at this request; .* failure ([0-9a-f]{8})", answer["error"])
    assert status == 500
    assert found is not None
    assert f"failure {found[1]}: GET /v1/health" in caplog.text


async def test_what_the_database_changes_is_not_stored(
    controller: tuple[Controller, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, held = controller
    from skyserve_cli.state import goals

    read = goals.read_version
    monkeypatch.setattr(
        goals,
        "read_version",
        lambda *key: (row := read(*key)).__class__(
            row.service, row.version, row.replica_hash, {**row.spec, "num_nodes": 7}, row.sealed_secrets
        ),
    )
    status, answer = await put(here, held, SPEC)
    assert status == 500
    assert answer["error"].startswith("num_nodes: the database would not give it back as it was sent")
    assert here.store.services(down=True) == []


# --- what is stored and cannot be read --------------------------------------------------------------------------


DAMAGED = {
    "a number that is null": '{"name": "alpha", "run": "x", "drain_timeout_s": null}',
    "of another program": '{"title": "alpha"}',
    "no JSON": '{"name": "al',
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
async def test_a_service_that_cannot_be_read_is_broken_and_no_other(
    controller: tuple[Controller, str], text: str
) -> None:
    here, held = controller
    for name in ("alpha", "beta"):
        assert (await here.up(SMALL, name=name))[0] == 200
    with here.store.database.writing() as c:
        c.execute(sa.text("UPDATE versions SET spec = :text WHERE service = 'alpha'"), {"text": text})
    _, found = await here.call("GET", "/v1/services")
    alpha, beta = found["services"]
    assert (alpha["name"], alpha["status"], beta["status"]) == ("alpha", "BROKEN", "REPLICA_INIT")
    assert re.match(
        r"version 1 cannot be read \(.+\); its replicas are left as they are: `serve update", alpha["notes"]
    )
    assert beta["notes"] == ""
    for path in (
        "fleet",
        "services/alpha",
        "services/alpha/history",
        "services/alpha/usage",
        "events",
        "teams",
    ):
        assert (await here.call("GET", f"/v1/{path}"))[0] == 200, path
    assert (await put(here, held, SPEC, mode="rolling"))[0] == 200
    _, found = await here.call("GET", "/v1/services")
    assert found["services"][0]["status"] != "BROKEN"
    with here.store.database.writing() as c:
        c.execute(sa.text("UPDATE versions SET spec = :text WHERE version = 2"), {"text": text})
    here.specs.__init__(here.store, SecretBox(here.home.sealing_keys()[0]))  # type: ignore[misc]  # as after a restart
    status, answer = await call(here, held, "POST", "/v1/services/alpha/down", {})
    assert (status, answer) == (200, {})


# --- drawn specs ------------------------------------------------------------------------------------------------

HOSTILE = st.one_of(
    st.sampled_from(
        [
            float("nan"),
            float("inf"),
            -float("inf"),
            -1,
            -0.0,
            0,
            1,
            2,
            7.5,
            1e-300,
            1e308,
            2**31,
            2**63,
            -(10**30),
            10_000,
            10_001,
        ]
    ),
    st.sampled_from(
        [
            None,
            True,
            False,
            "",
            " ",
            "nan",
            "1",
            "a\r\nb: c",
            "\0",
            "\ud800",
            "$X",
            "../..",
            "x" * 300_000,
            "*",
            "é",
        ]
    ),
    st.sampled_from(
        [[], {}, [[]], [None], {"a": 1}, [["A", "b"], ["A", "c"]], [1, 1], ["aws", "x"], {"cloud": "gcp"}]
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
)


def leaves(value: object, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of the document, inner ones too."""
    inside: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list):
        inside = list(enumerate(value))
    return [at, *(place for key, inner in inside for place in leaves(inner, (*at, key)))]


@st.composite
def crafted(draw: st.DrawFn) -> dict[str, Any]:
    """A right document of which a few places are wrong, or merely different."""
    document: Any = json.loads(json.dumps(draw(st.sampled_from([SPEC, FULL]))))
    for _ in range(draw(st.integers(0, 3))):
        *way, last = draw(
            st.sampled_from([place for place in leaves(document) if place and place != ("name",)])
        )
        inner = document
        for step in way:
            inner = inner[step]
        what = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if what == "replace":
            inner[last] = copy.deepcopy(draw(HOSTILE))
        elif what == "remove":
            del inner[last]
        elif isinstance(inner, dict):
            inner[draw(st.text(max_size=5))] = copy.deepcopy(draw(HOSTILE))
        else:
            inner.append(copy.deepcopy(draw(HOSTILE)))
    return document  # type: ignore[no-any-return]


def test_a_drawn_spec_is_refused_by_its_path_or_kept_as_it_was_sent(tmp_path: Path) -> None:
    counts: dict[int, int] = {}

    with asyncio.Runner() as runner:
        stack = running(tmp_path)
        here, held = runner.run(stack.__aenter__())

        @settings(
            max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None
        )
        @given(crafted())
        def one(document: dict[str, Any]) -> None:
            rows = here.store.services()
            status, answer = runner.run(put(here, held, document, mode="rolling" if rows else None))
            counts[status] = counts.get(status, 0) + 1
            if status == 200:
                stored = here.store.version("alpha", answer["version"]).spec
                assert (
                    spec_from_json(stored)
                    == sent_spec(document)
                    == spec_from_json(json.loads(json.dumps(document)))
                )
                assert runner.run(here.call("GET", "/v1/services"))[0] == 200
                return
            assert status in (400, 403, 422), answer
            if status == 400:
                assert re.match(r'(\w+|\["|\[\d|has more than|is nested)[^:]*', answer["error"]), answer
                assert not re.match(r"\w+Error: ", answer["error"]), answer
            assert here.store.services() == rows

        one()
        runner.run(stack.__aexit__(None, None, None))
    print(f"drawn specs by status: {counts}")
    assert counts[400] > EXAMPLES // 4
    assert counts[200] > 0
