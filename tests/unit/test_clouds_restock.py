"""A running controller offers from the catalog's files as they are now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policies.model import CapacityType
from provisioners.offers.catalog import stock
from provisioners.offers.catalog.discovered import Discovery, RegionalType
from provisioners.offers.catalog.store import save_discovery
from provisioners.port.base import Candidate, Requirements
from skyserve_cli.clouds import Clouds
from skyserve_cli.config import load_config
from skyserve_cli.home import Home

NOW = 1_790_000_000.0
NEED = Requirements((Candidate(cloud="aws", accelerator="L4", accelerator_count=1, region="us-east-1"),))


def test_files_that_change_are_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [NOW]
    monkeypatch.setattr("skyserve_cli.clouds.unix_now", lambda: clock[0])
    monkeypatch.setattr(
        "provisioners.offers.spot_prices.SpotPrices.refresh_soon", lambda prices: None
    )  # no calls
    home = Home.from_environment({"SKYSERVE_HOME": str(tmp_path)})
    home.config.write_text("clouds: {aws: {}}\n")
    clouds = Clouds(home, load_config(home.config))

    def prices() -> set[float]:
        return {offer.price_usd_hour for offer in clouds.get("aws").offers(NEED)}

    assert prices() == {0.8048}
    own = tmp_path / "catalog" / "extra.json"
    own.parent.mkdir()
    own.write_text(
        json.dumps([{"cloud": "aws", "instance_type": "g6.xlarge", "region": "us-east-1", "usd_hour": 0.5}])
    )
    assert prices() == {0.8048}  # files are looked at every few seconds
    clock[0] += 10.0
    assert prices() == {0.5}
    own.write_text("[{}]")
    clock[0] += 10.0
    assert prices() == {0.5}  # a wrong file changes nothing
    own.unlink()

    shapes = {row.shape for row in stock(tmp_path).catalog.by_accelerator["L4"] if row.shape.cloud == "aws"}
    closed = {CapacityType.ON_DEMAND: "the quota is 0"}
    found = tuple(RegionalType(shape, "us-east-1", ("use1-az1",), closed) for shape in shapes)
    save_discovery(tmp_path, Discovery("aws", clock[0], ("us-east-1",), found))
    clock[0] += 10.0
    assert prices() == set()
    clock[0] += 31 * 86400.0
    assert prices() == {0.8048}  # an old discovery forbids nothing, in a controller that runs as long, too
