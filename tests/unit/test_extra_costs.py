"""What machines cost beside their price."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyserve_cli.clouds import Clouds, extra_usd_hour
from skyserve_cli.commands.prices import extra_cost
from skyserve_cli.config import load_config
from skyserve_cli.home import Home


@pytest.mark.parametrize(
    ("cloud", "disk_gb", "has_address", "usd_month"),
    [
        ("aws", 256, True, 20.48 + 3.65),
        ("aws", 256, False, 20.48),
        ("gcp", 256, False, 25.6),
        ("azure", 256, True, 19.2 + 3.65),
        ("lambda", 256, True, 0.0),
        ("ssh", 256, True, 0.0),
    ],
)
def test_list_prices_of_a_month(cloud: str, disk_gb: int, has_address: bool, usd_month: float) -> None:
    assert extra_usd_hour(cloud, disk_gb, has_address=has_address) * 730 == pytest.approx(usd_month)


def test_the_configuration_decides_where_the_service_says_nothing(tmp_path: Path) -> None:
    home = Home.from_environment({"SKYSERVE_HOME": str(tmp_path)})
    home.config.write_text("clouds: {aws: {disk_gb: 100, use_private_ip: true}, gcp: {}, local: {}}\n")
    clouds = Clouds(home, load_config(home.config))
    told = [
        clouds.extra_usd_hour(*asked) * 730
        for asked in (("aws", None), ("aws", 50), ("gcp", None), ("local", 9))
    ]
    assert told == pytest.approx([8.0, 4.0, 29.25, 0.0])


def test_the_sentence() -> None:
    assert extra_cost({"beside_usd_per_hour": 0.0}) == extra_cost({}) == ""
    said = "Disks and public addresses cost about $0.0992 per hour more; traffic out of a cloud is extra."
    assert extra_cost({"beside_usd_per_hour": 0.0992}) == said
