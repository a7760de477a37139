"""What a service with an SLO costs the controller: CPU per minute, memory, database, imports.

    python -m benchmarks.slo_cost [--minutes 1440]

The service has 14 days of minutes. CPU is that of this process, not wall-clock time.

* `scaler`: one decision of the scaler, over `--minutes` minutes, of a service that learns weights of tokens, capacity and cold start
  on four kinds of replicas. `fit` are the minutes in which the forecast is fitted; `unchanged` is a second decision in the same minute.
* `tick`: the production tick of a controller with this service alone, in a simulated world, once a minute and in between.
* `memory`: the scaler's memory as JSON at the end.
* `database`: how much the file grows by the demand of one service: 14 days of minutes and 6 weeks of means of ten minutes.
* `imports`: CPU of a process that imports the controller and decides for a service without `slo`, and whether NumPy was imported
  by it, and by the load balancer agent with all its policies.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from policies.forecast import past
from policies.forecast.demand import DAY_MIN, Floats
from policies.goals import Goal, ScalingGoal, SloGoal
from policies.history import Load
from policies.model import CapacityType, Json, Observation, Offer, Replica, ReplicaState, Zone
from policies.scaling import predictive
from policies.scaling.cold_start import KEPT
from skyserve_cli.spec.model import Probe, ResourceChoice, ServiceSpec, SloSpec
from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import DemandRow
from tests.kit.fault_cloud import Faults
from tests.kit.histories import history_of
from tests.kit.life import Life

HISTORY_MIN = 14 * DAY_MIN
FOLDED_MIN = 6 * 7 * DAY_MIN
KINDS = ("T4", "L4", "A100", "H100")
QPS = 20.0

_WITHOUT_SLO = """
import sys, time
from policies.goals import Goal, ScalingGoal
from policies.model import Observation
from policies.registry import scaler_for
import skyserve_cli.controller.daemon
goal = ScalingGoal(1, 4, target_qps_per_replica=1.0)
scaler_for(goal).target(Observation(0.0, Goal(1, goal), (), ()), {})
print(time.process_time(), "numpy" in sys.modules)
"""
_BALANCER = """
import importlib, pkgutil, sys, time
import lb
for found in pkgutil.walk_packages(lb.__path__, "lb."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
import policies.routing.registry
print(time.process_time(), "numpy" in sys.modules)
"""


def demand(minutes: int) -> Floats:
    """A sine of a day with the noise of a Poisson process, requests per minute."""
    rate = 60.0 * QPS * (1.0 + 0.5 * np.sin(2 * np.pi * np.arange(minutes) / DAY_MIN))
    return np.random.RandomState(1).poisson(rate).astype(float)


def replicas() -> tuple[Replica, ...]:
    """Sixteen ready ones, of four kinds."""
    offers = [Offer(Zone("c", "r", "z"), "m", kind, 1.0, CapacityType.SPOT, 1.0) for kind in KINDS]
    return tuple(Replica(i + 1, 1, offers[i % 4], ReplicaState.READY, 0.0, 0.0) for i in range(16))


def scaler(minutes: int) -> tuple[list[float], list[float], list[bool], Json]:
    """CPU seconds of each minute's decision, of a second one in it, whether it fitted, and the memory at the end."""
    series = demand(HISTORY_MIN + minutes)
    within = series * np.where(np.arange(len(series)) % 97, 1.0, 0.97)
    ready = np.full(len(series), 16.0)
    tokens = 700.0 * series, 200.0 * series
    whole = history_of(0, series.tolist(), within.tolist(), ready.tolist(), tokens)
    goal = Goal(1, ScalingGoal(1, 60, slo=SloGoal(0.995, None, 300.0, learns_cold_start=True)))
    fleet = replicas()
    starts = {kind.value: [240 + index for index in range(KEPT)] for kind in CapacityType}
    memory: Json = {"target": 16, "starts": starts}
    first, again, fitted = [], [], []
    for end in range(HISTORY_MIN, HISTORY_MIN + minutes + 1):
        known = whole.until(end).since(end - HISTORY_MIN)
        seen = Observation(
            60.0 * end, goal, fleet, (fleet[0].offer,), Load(60.0, 0, ongoing=90.0, known=True), history=known
        )
        misses = past._fitted.cache_info().misses
        began = time.process_time()
        memory = predictive.Predictive().target(seen, memory).memory
        first.append(time.process_time() - began)
        fitted.append(past._fitted.cache_info().misses > misses)
        began = time.process_time()
        predictive.Predictive().target(seen, memory)
        again.append(time.process_time() - began)
    return first[1:], again[1:], fitted[1:], memory  # the first minute imports and fits twice


def tick(minutes: int) -> tuple[list[float], list[float], list[float]]:
    """CPU seconds of the ticks in which a minute was decided by, of those that also fitted a forecast, and of the others."""
    life = Life(1, Faults())
    life.put(
        ServiceSpec(
            "chat",
            "serve",
            probe=Probe(path="/health"),
            scaling=ScalingGoal(1, 60),
            slo=SloSpec(ttft_ms=2000.0, attainment=0.995, capacity_qps=2.0),
            resources=(ResourceChoice(cloud="sim"),),
        )
    )
    life.agents.requests_per_s["chat"] = QPS
    now_min = int(life.clock.now() // 60.0)
    life.store.put_demand("chat", list(rows(now_min - HISTORY_MIN, demand(HISTORY_MIN))))
    decided, fitted, quiet = list[float](), list[float](), list[float]()
    for number in range(12 * minutes):
        life.clock.advance(life.clock.now() + 5.0)
        before = life.row("chat").memory.scaling.get("minute")
        misses = past._fitted.cache_info().misses
        began = time.process_time()
        life.reconciler.tick()
        took = time.process_time() - began
        if number >= 120:  # the fleet has come up
            same = life.row("chat").memory.scaling.get("minute") == before
            fits = past._fitted.cache_info().misses > misses
            (quiet if same else fitted if fits else decided).append(took)
    return decided, fitted, quiet


def rows(first: int, series: Floats, step: int = 1) -> Iterable[DemandRow]:
    for index, asked in enumerate(series.tolist()):
        yield DemandRow(first + index * step, asked, 700.0 * asked, 200.0 * asked, 0.004 * asked, 16.0)


def database() -> int:
    """Bytes by which the file of the store grows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.db"
        store = Store(Database(f"sqlite:///{path}"))
        before = _size(folder)
        now = FOLDED_MIN + HISTORY_MIN
        series = demand(now)
        for start in range(0, now, DAY_MIN):
            store.put_demand("chat", list(rows(start, series[start : start + DAY_MIN])))
            store.fold_demand(start + DAY_MIN)
        store.close()
        return _size(folder) - before


def _size(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).iterdir())


def imported(code: str) -> tuple[float, bool]:
    """CPU seconds of a process that runs the code, and whether it has NumPy."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, has_numpy = done.stdout.split()
    return float(seconds), has_numpy == "True"


def _ms(name: str, took: list[float]) -> str:
    if not took:
        return f"{name:24} none"
    low, high = 1000 * float(np.median(took)), 1000 * max(took)
    return f"{name:24} median {low:6.2f} ms, most {high:6.2f} ms, of {len(took)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=int, default=DAY_MIN)
    args = parser.parse_args()
    first, again, fitted, memory = scaler(args.minutes)
    print(_ms("scaler, a minute", [took for took, fits in zip(first, fitted, strict=True) if not fits]))
    print(_ms("scaler, fit", [took for took, fits in zip(first, fitted, strict=True) if fits]))
    print(_ms("scaler, unchanged", again))
    decided, fits, quiet = tick(args.minutes)
    print(_ms("tick, a minute", decided))
    print(_ms("tick, fit", fits))
    print(_ms("tick, unchanged", quiet))
    print(
        f"{'memory':24} {len(json.dumps(memory))} bytes, {len(memory['capacity'])} kinds of replicas learned"
    )
    print(f"{'database':24} {database() / 1e6:.2f} MB for 14 days of minutes and 6 weeks of means")
    for name, code in (("imports, without slo", _WITHOUT_SLO), ("imports, load balancer", _BALANCER)):
        seconds, has_numpy = imported(code)
        print(f"{name:24} {seconds:.2f} s of CPU, NumPy {'imported' if has_numpy else 'not imported'}")


if __name__ == "__main__":
    main()
