"""Replicas from before alternatives were stored: the migration finds the one that each was launched with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

import skyserve_cli.state
from policies.model import ReplicaState
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.model import ResourceChoice, ServiceSpec
from skyserve_cli.state import tables as t
from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store
from tests.unit.databases import KINDS, empty_database

BEFORE = "0004"
L4 = {"accelerator": "L4", "accelerator_count": 1.0}
A100 = {"accelerator": "A100", "accelerator_count": 1.0}


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return empty_database(request.param, tmp_path)


def migrate(url: str, revision: str, go: Any = command.upgrade) -> None:
    config = Config()
    config.set_main_option(
        "script_location", str(Path(next(iter(skyserve_cli.state.__path__))) / "migrations")
    )
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        go(config, revision)
    engine.dispose()


def fill(url: str, choices: list[Mapping[str, object]], rows: list[dict[str, Any]]) -> None:
    """A service of one version, as the tables of the revision before have it."""
    spec = ServiceSpec("chat", "run", resources=tuple(ResourceChoice(**one) for one in choices))  # type: ignore[arg-type]
    plain = {
        "service": "chat", "version": 1, "state": "READY", "since": 1.0, "created_at": 1.0, "cloud": "aws",
        "region": "us-east-1", "zone": "use1-az1", "instance_type": "g6.xlarge", "accelerator": "L4",
        "accelerator_count": 1.0, "capacity_type": "spot", "price_usd_hour": 0.3, "message": "", "role": "replica",
        "launched_at": 2.0,
    }  # fmt: skip
    service = {
        "name": "chat", "incarnation": "ab", "created_at": 1.0, "version": 1, "update_mode": "rolling", "down": False,
        "purge": False, "target": 1, "notes": "", "next_replica_id": 9, "memory": {}, "lb_port": 1, "folded_usd": 0.0,
        "folded_on_demand_usd": 0.0,
    }  # fmt: skip
    version = {
        "service": "chat", "version": 1, "created_at": 1.0, "replica_hash": "h", "spec": spec_to_json(spec),
        "sealed_secrets": b"",
    }  # fmt: skip
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(t.services.insert(), service)
        connection.execute(t.versions.insert(), version)
        for number, row in enumerate(rows, 1):
            connection.execute(t.replicas.insert(), {**plain, "id": number, **row})
    engine.dispose()


@pytest.mark.parametrize(
    ("choices", "row", "found"),
    [
        pytest.param([L4], {}, 0, id="the only one"),
        pytest.param([A100, L4], {}, 1, id="by accelerator"),
        pytest.param([{**L4, "accelerator_count": 4.0}, L4], {}, 1, id="by count"),
        pytest.param(
            [L4, {**A100, "accelerator": "A100-40GB"}], {"accelerator": "A100"}, 1,
            id="by any name of the accelerator",
        ),
        pytest.param([{**L4, "cloud": "gcp"}, {**L4, "cloud": "aws"}], {}, 1, id="by cloud"),
        pytest.param([{**L4, "region": "eu"}, {**L4, "region": "US-East-1"}], {}, 1, id="by region"),
        pytest.param([{**L4, "zone": "z"}, {**L4, "zone": "use1-az1"}], {}, 1, id="by zone"),
        pytest.param([{**L4, "use_spot": False}, {**L4, "use_spot": True}], {}, 1, id="by capacity type"),
        pytest.param(
            [A100, {**L4, "use_spot": True}], {"capacity_type": "on_demand"}, 1, id="a stand-in for a spot one"
        ),
        pytest.param(
            [{"instance_type": "g5.xlarge"}, {"instance_type": "G6.xlarge"}], {}, 1, id="by instance type"
        ),
        pytest.param(
            [A100, {"instance_type": "n1-standard-8"}],
            {"instance_type": "n1-standard-8+1xnvidia-tesla-t4", "accelerator": "T4"}, 1, id="by machine type",
        ),
        pytest.param([L4, {}], {"accelerator": None, "accelerator_count": 0.0}, 1, id="without accelerator"),
        pytest.param([{**L4, "images": (("gcp", "x"),)}, L4], {}, 1, id="not one whose image is of elsewhere"),
        pytest.param(
            [{**L4, "memory": "64+", "disk_size_gb": 1000}, {**L4, "disk_size_gb": 100}], {}, 0,
            id="launched with the first, although its offer was made for the second",
        ),
        pytest.param([A100, L4], {"state": "REQUESTED", "launched_at": None}, 1, id="whose order is sent again"),
        pytest.param([A100, L4], {"state": "GONE", "ended_at": 3.0}, 0, id="one that ended is left alone"),
        pytest.param([A100, L4], {"role": "load_balancer"}, 0, id="a load balancer has no alternative"),
        pytest.param([A100, A100], {}, 0, id="none fits: the first"),
    ],
)  # fmt: skip
def test_a_row_of_before_has_the_alternative_that_was_launched(
    url: str, choices: list[Mapping[str, object]], row: dict[str, Any], found: int
) -> None:
    migrate(url, BEFORE)
    fill(url, choices, [row])
    store = Store(Database(url))
    (replica,) = store.replicas("chat")
    store.close()
    assert replica.offer.choice == found


def test_all_rows_survive(url: str) -> None:
    migrate(url, BEFORE)
    fill(
        url, [A100, L4], [{}, {"state": "GONE", "ended_at": 3.0, "end_reason": "PREEMPTED"}, {"region": "r"}]
    )
    store = Store(Database(url))
    assert [(one.id, one.state, one.zone.region, one.offer.choice) for one in store.replicas("chat")] == [
        (1, ReplicaState.READY, "us-east-1", 1),
        (2, ReplicaState.GONE, "us-east-1", 0),
        (3, ReplicaState.READY, "r", 1),
    ]
    assert store.spent(3602.0)["chat"].usd > 0.6
    store.close()
    migrate(url, BEFORE, command.downgrade)
    migrate(url, "head")
    store = Store(Database(url))
    assert [one.offer.choice for one in store.replicas("chat")] == [1, 0, 1]
    store.close()
