"""`serve catalog` as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clouds.gcp.gcp_ground import PROJECT
from tests.clouds.gcp.gcp_parts import RealClock
from tests.clouds.gcp.gcp_server import serving
from tests.clouds.gcp.gcp_world import World as GcpWorld
from tests.clouds.price_apis import PriceWorld, meter, price_world

pytestmark = pytest.mark.long


@pytest.fixture
def world(serve: Any) -> Iterator[PriceWorld]:
    with price_world() as found:
        serve.environment["SKYSERVE_AZURE_PRICES_URL"] = found.url
        serve.environment["NO_PROXY"] = "127.0.0.1"
        yield found


def test_what_a_machine_costs(serve: Any) -> None:
    rows = serve.ok("catalog", "--accelerator", "a100", "-o", "json").json()
    assert {row["accelerator"] for row in rows} == {"A100"}
    lowest = [min(each["usd_hour"] for each in (row["spot"], row["on_demand"]) if each) for row in rows]
    assert lowest == sorted(lowest)
    assert all(row["on_demand"]["source"] and row["on_demand"]["quality"] for row in rows)
    assert all(row["on_demand"]["as_of"] is None or row["on_demand"]["age_s"] >= 0 for row in rows)


@pytest.mark.parametrize(
    ("flags", "holds"),
    [
        pytest.param(["--accelerator", "L4:4"], lambda row: row["accelerator_count"] == 4, id="so many of it"),
        pytest.param(["--accelerator", "none"], lambda row: row["accelerator"] is None, id="machines without any"),
        pytest.param(["--cloud", "AZURE"], lambda row: row["cloud"] == "azure", id="of a cloud"),
        pytest.param(["--region", "us-east-1"], lambda row: row["region"] == "us-east-1", id="in a region"),
        pytest.param(["--cloud", "aws", "--spot"], lambda row: row["spot"] is not None, id="that have a spot price"),
    ],
)  # fmt: skip
def test_what_is_listed(serve: Any, flags: list[str], holds: Any) -> None:
    rows = serve.ok("catalog", *flags, "-o", "json").json()
    assert rows
    assert all(map(holds, rows))


def test_by_which_price(serve: Any) -> None:
    rows = serve.ok("catalog", "--accelerator", "L4", "--on-demand", "--limit", "5", "-o", "json").json()
    prices = [row["on_demand"]["usd_hour"] for row in rows]
    assert len(prices) == 5
    assert prices == sorted(prices)


def test_a_long_list_is_cut_and_says_so(serve: Any) -> None:
    said = serve.ok("catalog")
    header, *rows = said.out.splitlines()
    assert header.split()[:4] == ["CLOUD", "ZONE", "INSTANCE", "ACCELERATOR"]
    assert len(rows) == 40
    assert "more; --limit 0 lists them all" in said.err
    assert serve.ok("catalog", "--limit", "0", "--accelerator", "H200").err == ""


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--accelerator", "A1000"], "the catalog has no accelerator 'A1000'; did you mean 'A100'?"),
        (["--accelerator", "L4:many"], "like L4:4 (got 'L4:many')"),
        (["--cloud", "gpc"], "the catalog has no cloud 'gpc'; did you mean 'gcp'?"),
        (["--region", "us-esat-1"], "the catalog has no region 'us-esat-1'; did you mean 'us-east-1'?"),
        (["refresh", "--cloud", "asw"], "the catalog has no cloud 'asw'; did you mean 'aws'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_2_and_a_sentence(serve: Any, flags: list[str], sentence: str) -> None:
    said = serve("catalog", *flags)
    assert (said.code, said.out) == (2, "")
    assert sentence in said.err


def test_refreshed_prices_are_listed_with_their_new_age(serve: Any, world: PriceWorld) -> None:
    name = "Standard_NC4as_T4_v3"
    world.meters = [meter(name, "eastus", 0.55), meter(name, "eastus", 0.15, spot=True)]
    said = serve.ok("catalog", "refresh", "--cloud", "azure")
    assert "azure: 4 prices taken over, 0 refused" in said.err
    rows = serve.ok("catalog", "--region", "eastus", "--accelerator", "T4:1", "-o", "json").json()
    (row,) = [row for row in rows if row["instance_type"] == name and row["zone"] == "eastus-2"]
    assert (row["on_demand"]["usd_hour"], row["spot"]["usd_hour"]) == (0.55, 0.15)
    assert row["spot"]["source"] == "Azure Retail Prices API"
    others = [row for row in rows if row["instance_type"] != name]
    assert all("Retail Prices API" not in row["on_demand"]["source"] for row in others)


def test_an_absurd_price_is_refused_unless_accepted(serve: Any, world: PriceWorld) -> None:
    world.meters = [meter("Standard_NC4as_T4_v3", "eastus", 5.55)]
    refused = serve.ok("catalog", "refresh", "--cloud", "azure")
    assert "Standard_NC4as_T4_v3 in eastus: 5.55 USD per hour, and was 0.526" in refused.err
    assert "--accept takes those over" in refused.err
    accepted = serve.ok("catalog", "refresh", "--cloud", "azure", "--accept", "-o", "json").json()
    assert accepted == [{"cloud": "azure", "asked": True, "why": "", "taken": 1, "refused": []}]


def test_a_cloud_that_cannot_be_asked_keeps_its_prices(serve: Any) -> None:
    said = serve("catalog", "refresh", "--cloud", "gcp")
    assert (said.code, said.out) == (1, "")
    assert "set SKYSERVE_GCP_API_KEY" in said.err
    assert "prices as they were: gcp" in said.err


def test_a_broken_file_is_named(serve: Any) -> None:
    (serve.home / "catalog").mkdir()
    (serve.home / "catalog" / "aws.json").write_text("{")
    said = serve("catalog")
    assert said.code == 2
    assert "aws.json is no catalog" in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("serve catalog --accelerator A10", {"A100", "A100-80GB", "A10G"}),
        ("serve catalog --cloud a", {"aws", "azure"}),
    ],
)
def test_the_shell_completes_names(serve: Any, words: str, completed: set[str]) -> None:
    env = {
        "_SERVE_COMPLETE": "complete_bash",
        "_TYPER_COMPLETE_ARGS": words,
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    assert set(serve(env=env).out.split()) == completed


def test_what_an_account_can_have_is_found_kept_and_heeded(serve: Any) -> None:
    """A region that the catalog lacks, and a quota of nothing."""
    world = GcpWorld(clock=RealClock(), zones=("us-central1-a", "mars-west1-a"))
    world.quotas["us-central1", "NVIDIA_L4_GPUS"] = 0.0
    with serving(world) as url:
        section = {"project": PROJECT, "endpoint": url, "regions": ["us-central1", "mars-west1"]}
        (serve.home / "config.yaml").write_text(json.dumps({"clouds": {"gcp": section}}))
        (found,) = serve.ok("catalog", "discover", "-o", "json").json()
    assert found["regions"] == ["mars-west1", "us-central1"]
    why = "the quota NVIDIA_L4_GPUS is 0 in us-central1, and g2-standard-4 has 1"
    assert why in found["closed"]
    rows = serve.ok("catalog", "--accelerator", "L4", "--region", "mars-west1", "-o", "json").json()
    assert {row["on_demand"]["quality"] for row in rows} == {"estimated"}
    closed = serve.ok("catalog", "--accelerator", "L4", "--region", "us-central1", "-o", "json").json()
    assert all("on_demand" in row["closed"] for row in closed)
    file = serve.home / "one.yaml"
    file.write_text(
        "resources: {accelerators: L4, infra: gcp/us-central1}\nservice: {readiness_probe: /}\nrun: x\n"
    )
    nothing = serve("plan", str(file))
    assert nothing.code != 0
    assert why in " ".join(nothing.err.split())
