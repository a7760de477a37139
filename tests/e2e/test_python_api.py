"""`import skyserve`: a service from Python, and the notebook among the examples."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import skyserve

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "19-python" / "service.yaml"
NOTEBOOK = FILE.with_name("notebook.ipynb")
pytestmark = pytest.mark.long


@pytest.fixture
def client(serve: Any, monkeypatch: pytest.MonkeyPatch) -> skyserve.Client:
    for name in [name for name in os.environ if name.startswith("SKYSERVE_")]:
        monkeypatch.delenv(name)
    for name, value in serve.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    return skyserve.Client()


def test_a_service_from_up_to_down(client: skyserve.Client, tmp_path: Path) -> None:
    one = client.load(FILE, changes=["replicas=1"])
    plan = client.plan(one)
    assert [launch.capacity_type for launch in plan.launches] == ["spot"]
    assert 0 < plan.usd_per_hour == plan.usd_per_hour_at_first < plan.json["usd_per_hour_on_demand"]
    spare = client.plan(ROOT / "examples" / "07-spothedge" / "service.yaml")
    (for_now,) = [launch.usd_per_hour for launch in spare.launches if launch.stands_in][:1]
    assert spare.usd_per_hour <= spare.usd_per_hour_at_first - for_now

    service = client.up(one, timeout_s=60)
    assert (service.name, service.ready, service.version) == ("notebook", 1, 1)
    assert service.endpoint.startswith("http://127.0.0.1:")
    assert [replica.state for replica in service.replicas] == ["READY"]
    assert [each.name for each in client.services()] == ["notebook"]
    with pytest.raises(skyserve.ServiceFailedError, match="notebook is up; use update"):
        client.up(one)

    wider = client.update(client.load(FILE, changes=["replicas=2"]), timeout_s=60)
    assert (wider.ready, wider.version, wider.endpoint) == (2, 2, service.endpoint)
    broken = tmp_path / "broken.yaml"
    broken.write_text(FILE.read_text().replace("serve engine", "exit 3 #"))
    with pytest.raises(skyserve.ServiceFailedError, match="version 3 was given up"):
        client.update(broken, timeout_s=60)
    assert client.status("notebook").ready == 2

    events = list(client.events("notebook"))
    assert [event.seq for event in events] == sorted({event.seq for event in events})
    assert {event.service for event in events} == {"notebook"}
    assert len([event for event in events if event.state == "READY"]) >= 2
    later = [event.seq for event in client.events("notebook", after=events[3].seq)]
    assert later[: len(events) - 4] == [event.seq for event in events[4:]]  # more may have happened meanwhile

    client.down("notebook", timeout_s=60)
    assert client.services() == []
    with pytest.raises(skyserve.ServiceFailedError, match="there is no service 'notebook'"):
        client.status("notebook")


def test_what_cannot_be_is_an_error_with_its_reason(client: skyserve.Client, tmp_path: Path) -> None:
    with pytest.raises(skyserve.ControllerDownError):
        client.services()
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("service: {replicas: -1}\nrun: x\n")
    with pytest.raises(skyserve.SpecError, match=r"service\.replicas"):
        client.up(wrong)
    slow = tmp_path / "slow.yaml"
    slow.write_text(FILE.read_text().replace("serve engine", "sleep 1000 #"))
    with pytest.raises(skyserve.WaitTimeoutError, match="not done after 1 s"):
        client.up(slow, timeout_s=1)
    client.down("notebook", purge=True, timeout_s=60)


def test_the_notebook_runs(client: skyserve.Client, capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), names)  # noqa: S102
    printed = capsys.readouterr().out
    assert "2 replicas for $" in printed
    assert "Preempted" in printed
    assert "2 ready;" in printed
    assert client.services() == []
