"""`serve plan` over three clouds without credentials, and its message where no cloud has an offer."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.clouds.schedules import only_long
from tests.e2e.conftest import Serve

pytestmark = pytest.mark.long

CLOUDS = (
    "clouds: {aws: {}, gcp: {}, azure: {subscription_id: 00000000-0000-0000-0000-000000000000}, local: {}}\n"
)
SERVICE = """
service:
  replica_policy: {min_replicas: 2, spot_placer: dynamic_fallback}
resources: {accelerators: {A100: 1, A100-80GB: 1, L4: 1, H100: 8}}
run: serve
"""


@pytest.fixture
def planner(tmp_path: Path) -> Serve:
    """A home in which three clouds are enabled and none can be used. Nothing is started there."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.yaml").write_text(CLOUDS)
    serve = Serve(home)
    nobody = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/nowhere", "HOME": str(tmp_path)}
    known = {k: v for k, v in serve.environment.items() if not k.startswith(("AWS_", "GOOGLE_", "AZURE_"))}
    serve.environment = {**known, **nobody}
    return serve


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "chat.yaml"
    path.write_text(SERVICE)
    return path


def test_zones_of_three_clouds_are_listed_by_price_without_credentials(planner: Serve, file: Path) -> None:
    plan = planner.ok("plan", file, "-o", "json").json()
    candidates = plan["candidates"]
    prices = [each["price_usd_hour"] for each in candidates]
    assert prices == sorted(prices)
    assert {each["cloud"] for each in candidates} == {"aws", "gcp", "azure"}
    assert {each["accelerator"] for each in candidates} == {"A100", "A100-80GB", "L4", "H100"}
    assert plan["offers"] == len(candidates) > 50
    assert (plan["placement"], plan["load_balancing_policy"]) == ("spothedge", "gorgo")
    assert {launch["zone"] for launch in plan["launches"]} <= {each["zone"] for each in candidates[:5]}
    assert planner.processes() == [], "nothing was started"


@pytest.mark.parametrize(("flags", "rows"), [((), 10), (("--limit", "3"), 3), (("--limit", "0"), 0)])
def test_a_table_shows_the_best_of_them(
    planner: Serve, file: Path, flags: tuple[str, ...], rows: int
) -> None:
    said = planner.ok("plan", file, *flags).out.splitlines()
    assert said[-1] == "Placement: spothedge. Load balancing: gorgo."
    total = next(place for place, line in enumerate(said) if line.startswith("2 replicas for $"))
    listed = said[total + 1 : -1]
    assert len(listed) == (rows + 2 if rows else 0)
    assert not rows or f"the first {rows} of" in listed[0]


def override(**resources: object) -> tuple[str, ...]:
    return tuple(f"--set=resources.{key}={json.dumps(value)}" for key, value in resources.items())


@pytest.mark.parametrize(
    ("asked", "path", "said"),
    [
        ({"accelerators": "L4:3"}, "resources.accelerators", "no machine has 3 of L4; there are machines with 1, 2,"),
        ({"accelerators": "H100:8", "infra": "gcp/us-east9"}, "resources.infra", "no region 'us-east9' on gcp"),
        ({"infra": "local/mars"}, "resources.infra", "local has no region 'mars'; it has asia, eu, us"),
        ({"infra": "local/us/us-z"}, "resources.infra", "local has no zone 'us-z'"),
        ({"infra": "local", "max_hourly_cost": 0.01}, "resources.max_hourly_cost", "the cheapest node on local costs"),
        (
            {"any_of": [{"accelerators": "L4:3"}, {"infra": "local/mars"}]},
            "resources.any_of[0].accelerators",
            "resources.any_of[1].infra",
        ),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_nobody_has_is_refused_with_the_key_that_asks_for_it(
    planner: Serve, file: Path, asked: dict[str, Any], path: str, said: str
) -> None:
    refused = planner("plan", file, *override(**asked))
    assert (refused.code, refused.out) == (2, "")
    assert any(line.startswith(f"{path}: ") for line in refused.err.splitlines())
    assert said in refused.err


def test_a_cloud_that_is_not_configured_is_planned_with_a_warning(planner: Serve, file: Path) -> None:
    (planner.home / "config.yaml").write_text("clouds: {local: {}}\n")
    planned = planner.ok("plan", file, *override(infra="azure", accelerators="A100:8"), "-o", "json")
    assert {each["cloud"] for each in planned.json()["candidates"]} == {"azure"}
    assert "warning: azure is not enabled here" in planned.err
    here = planner.ok("plan", file, "-o", "json")
    assert {each["cloud"] for each in here.json()["candidates"]} == {"local"}
    assert "not enabled" not in here.err
    regions = "--set=service.load_balancers={regions: [gcp/us-central1]}"
    agents = planner.ok("plan", file, regions, "-o", "json").json()["load_balancers"]
    assert [each["cloud"] for each in agents] == ["gcp"]


def test_an_alternative_that_has_nothing_is_told_and_the_others_are_planned_with(
    planner: Serve, file: Path
) -> None:
    said = planner.ok(
        "plan", file, *override(any_of=[{"infra": "aws/atlantis-1"}, {"infra": "gcp"}]), "-o", "json"
    )
    assert {each["cloud"] for each in said.json()["candidates"]} == {"gcp"}
    assert "warning: resources.any_of[0].infra: the catalog has no region 'atlantis-1' on aws" in said.err


def test_your_own_hosts_say_what_they_lack(planner: Serve, file: Path) -> None:
    hosts = "[{name: one, address: 192.0.2.1, accelerators: {L4: 2}}]"
    (planner.home / "config.yaml").write_text(
        f"clouds: {{ssh: {{pools: {{rack: {{user: me, identity_file: /k, hosts: {hosts}}}}}}}}}\n"
    )
    plain = ("--set=service.replica_policy={}", "--set=resources.infra=ssh")
    (found,) = planner.ok("plan", file, *plain, *override(accelerators="L4"), "-o", "json").json()[
        "candidates"
    ]
    assert (found["region"], found["zone"]) == ("rack", "one")
    for asked, path, sentence in (
        ({"accelerators": "H100"}, "accelerators", "no host of yours has H100; they have L4"),
        ({"accelerators": "L4:4"}, "accelerators", "no host of yours has L4:4; the most that one has is 2"),
        ({"accelerators": "L4", "infra": "ssh/shelf"}, "infra", "config.yaml has no region 'shelf' of hosts"),
        ({"accelerators": "L4", "use_spot": True}, "use_spot", "your own hosts are not spot machines"),
    ):
        refused = planner("plan", file, *plain, *override(**asked))
        assert refused.code == 2
        assert f"resources.{path}: {sentence}" in refused.err


def test_what_this_machine_cannot_copy_is_said_where_there_is_no_other(planner: Serve, file: Path) -> None:
    mount, said = "--set=file_mounts={/data: /etc/hostname}", "use a relative path"
    here = planner("plan", file, mount, *override(infra="local"))
    assert (here.code, said in here.err) == (2, True)
    assert said not in planner.ok("plan", file, mount, *override(infra="aws")).err


@only_long  # the planner is tested without a controller
def test_an_update_that_can_run_nowhere_changes_nothing(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "web.yaml"
    file.write_text("service: {}\nrun: exec python3 -m http.server $SKYSERVE_REPLICA_PORT\n")
    serve.ok("up", file, "-y")
    refused = serve("update", "web", file, "-y", "--set", "resources.infra=local/mars")
    assert (refused.code, refused.out) == (2, "")
    assert "resources.infra: local has no region 'mars'" in refused.err
    assert serve.view("web")["version"] == 1


def test_an_update_shows_what_it_does_to_the_live_replicas(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "web.yaml"
    file.write_text("name: web\nservice: {}\nrun: exec python3 -m http.server $SKYSERVE_REPLICA_PORT\n")
    serve.ok("up", file, "-y")
    same = serve.ok("update", "web", file, "-y")
    assert same.err == "nothing changes: web stays at version 1\n"
    grown = serve.ok("update", "web", file, "--dry-run", "--set", "replicas=3", "-o", "json")
    plan = grown.json()
    assert (len(plan["launches"]), plan["ends"], plan["replicas"]) == (2, [], 3)
    assert {
        "path": "replica_policy.min_replicas", "before": 1, "after": 3,
    } in plan["changes"]  # fmt: skip
    assert "replica_policy.min_replicas: 1 -> 3" in grown.err
    replaced = serve.ok("update", "web", file, "--dry-run", "--set", "setup=echo new", "-o", "json").json()
    assert [len(replaced["launches"]), [each["replica_id"] for each in replaced["ends"]]] == [1, [1]]
    other = tmp_path / "other.yaml"
    other.write_text(file.read_text().replace("name: web", "name: shop"))
    warned = serve.ok("update", "web", other, "--dry-run")
    assert "warning: name: the file is for service shop; this updates web" in warned.err
    assert serve.view("web")["version"] == 1
    serve.ok("controller", "stop")
    assert serve("status").err == serve("events").err


def test_files_are_copied_before_setup_and_their_bytes_make_a_version(serve: Serve, tmp_path: Path) -> None:
    source, folder = tmp_path / "note.txt", tmp_path / "folder"
    folder.mkdir()
    source.write_text("one")
    (folder / "inside.txt").write_text("inside")
    file = tmp_path / "files.yaml"
    file.write_text(
        f"""
service: {{}}
file_mounts: {{data/note.txt: {source}, data/many: {{source: [{source}, {folder}]}}}}
setup: cat data/note.txt data/many/note.txt data/many/folder/inside.txt >index.html
run: exec python3 -m http.server $SKYSERVE_REPLICA_PORT
"""
    )

    def served(endpoint: str) -> str:
        with urllib.request.urlopen(endpoint, timeout=30) as answer:
            return answer.read().decode()

    endpoint = serve.ok("up", file, "-y").out.strip().splitlines()[-1]
    assert served(endpoint) == "oneoneinside"
    assert serve.ok("update", "files", file, "-y").err == "nothing changes: files stays at version 1\n"
    source.write_text("two")
    assert "its replicas are replaced" in serve.ok("update", "files", file, "-y").err
    assert served(endpoint) == "twotwoinside"
    source.unlink()
    missing = serve("update", "files", file, "-y")
    assert missing.code == 2
    assert f'file_mounts["data/note.txt"]: {source} is not a file or folder of this machine' in missing.err


def test_what_cannot_be_copied_is_said_before_anything_is_launched(planner: Serve, file: Path) -> None:
    refused = planner("plan", file, "--set=file_mounts={/data: {store: r2, name: weights}}")
    assert refused.code == 2
    assert 'file_mounts["/data"]: a bucket in r2 needs its URL as source' in refused.err
