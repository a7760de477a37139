"""What version 0.2.0 stored means the same now: its specs, its database and the service files that it read.

The code of 0.2.0 wrote `data/`: service files, the documents that it stored for them (without sections that only hold
defaults), the goals that its policies got, and a dump of its database with two services.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from policies.model import ReplicaState
from skyserve_cli.controller.reconcile.lb_config import table_of
from skyserve_cli.controller.reconcile.mappers import goal_of
from skyserve_cli.spec import ServiceSpec, spec_from_json, spec_to_json
from skyserve_cli.spec.load import load_text
from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store
from tests.kit.rows import a_row

DATA = Path(__file__).with_name("data")
CASES: list[dict[str, Any]] = json.loads((DATA / "specs_0_2_0.json").read_text())
FILES = [case for case in CASES if "file" in case]
ROW = a_row(same_replicas=frozenset({1}))


def differing(spec: ServiceSpec, goal: dict[str, Any]) -> dict[str, Any]:
    """What policies get now and did not get then. Knobs of spot replicas are nothing to a service without any."""
    now = json.loads(json.dumps(asdict(goal_of(ROW, spec)), default=list))
    is_spot = any(choice.use_spot for choice in spec.resources)
    of_spot = () if is_spot else ("spot_price_cap", "spread_again_after_s")
    renamed = {"target_ongoing_per_replica": "target_ongoing_requests_per_replica"}
    then = {
        **{f"scaling.{renamed.get(key, key)}": value for key, value in goal["scaling"].items()},
        **{f"placement.{key}": value for key, value in goal["placement"].items() if key not in of_spot},
    }
    found = {f"{part}.{key}": value for part in ("scaling", "placement") for key, value in now[part].items()}
    whole = {key: now[key] for key in ("max_usd_hour", "initial_delay_s") if now[key] != goal[key]}
    return whole | {key: found[key] for key in then if found[key] != then[key]}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_stored_spec_means_the_same_to_policies(case: dict[str, Any]) -> None:
    assert differing(spec_from_json(case["stored"]), case["goal"]) == {}


@pytest.mark.parametrize("case", FILES, ids=lambda case: case["name"])
def test_a_file_means_the_same_as_what_was_stored_for_it(case: dict[str, Any]) -> None:
    spec = load_text(case["file"], name=case["stored"]["name"]).spec
    assert differing(spec, case["goal"]) == {}
    stored = spec_from_json(case["stored"])
    # What was the default then stays in force where it is stored; a file that does not name it turns it off now.
    access = replace(stored.load_balancer.access, overrides=False)
    assert replace(stored, load_balancer=replace(stored.load_balancer, access=access)) == spec


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_an_earlier_controller_reads_what_is_stored_now(case: dict[str, Any]) -> None:
    """By the keys and the values that it wrote itself; for what was left to choose it finds what was chosen."""
    new = spec_to_json(spec_from_json(case["stored"]))
    chosen = {"spot_placer": str, "dynamic_ondemand_fallback": bool}
    new["load_balancer"]["session"].pop("fields")  # which an earlier controller skips, as it does
    new["load_balancer"]["access"].pop("strict_json")
    new["load_balancer"]["access"].pop("keys_in_query")
    new["load_balancer"]["access"].pop("keys_file")
    new["load_balancer"]["access"].pop("prices")
    for section in ("replica_policy", "load_balancer"):
        old = case["stored"].get(section, {})
        if old.get("continuation", {}).get("mode") == "text":
            old["continuation"]["mode"] = "auto"  # as `text` is read now
        assert {key: new[section][key] for key in old if key not in chosen} == {
            key: value for key, value in old.items() if key not in chosen
        }
    assert all(type(new["replica_policy"][key]) is kind for key, kind in chosen.items())


def test_the_database_of_0_2_0_is_read_and_served(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with sqlite3.connect(path) as database:
        database.executescript((DATA / "home_0_2_0.sql").read_text())
    database.close()
    rows = {row.name: row for row in Store(Database(f"sqlite:///{path}")).services()}
    assert {name: [one.state for one in row.replicas] for name, row in rows.items()} == {
        "chat": [ReplicaState.READY],
        "llama": [ReplicaState.READY],
    }
    specs = {
        name: spec_from_json(dict(Store(Database(f"sqlite:///{path}")).version(name, 1).spec))
        for name in ("chat", "llama")
    }
    goal = goal_of(rows["chat"], specs["chat"])
    assert (goal.scaling.min_replicas, goal.placement.placer, goal.placement.num_overprovision) == (
        3,
        "spothedge",
        2,
    )
    table = table_of(
        "llama", specs["llama"], rows["llama"].replicas, goal_of(rows["llama"], specs["llama"]), {}, 0.0
    )
    limits = table.limits
    assert [target.url for target in table.targets] == ["http://10.0.0.1:8080"]
    assert (limits.idle_timeout_s, limits.max_held, limits.hold_s, limits.max_body_bytes) == (
        33.0,
        8,
        9.0,
        7 * 2**20,
    )


WRONG = {
    "a number of replicas": ({"replica_policy": {"min_replicas": "many"}}, "replica_policy.min_replicas: "),
    "a knob of the placer": ({"replica_policy": {"price_band": "wide"}}, "replica_policy.price_band: "),
    "the placer": ({"replica_policy": {"spot_placer": 5}}, "replica_policy.spot_placer: "),
    "the window": ({"replica_policy": {"load_window_s": []}}, "replica_policy.load_window_s: "),
    "a limit": ({"load_balancer": {"queue_size": "long"}}, "load_balancer.queue_size: "),
    "a section": ({"load_balancer": []}, "load_balancer: must be a mapping"),
}


@pytest.mark.parametrize(("change", "path"), WRONG.values(), ids=WRONG.keys())
def test_an_error_names_the_key_of_the_json_and_no_value(change: dict[str, Any], path: str) -> None:
    with pytest.raises(ValueError, match="^" + path.replace(".", r"\.")) as caught:
        spec_from_json({"name": "chat", "run": "serve", **change})
    assert not {"many", "wide", "long"} & set(str(caught.value).split())
