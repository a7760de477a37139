"""The production daemon over a cloud in memory, whose machines come up at once and all respond on a port of an address of their
own (127.x.y.z). Appends the instants of every tick's beginning and end, the CPU seconds of its thread between them, and the instant at
which all but large services had what they need, to the file $SKYSERVE_BENCH_TICKS. With $SKYSERVE_BENCH_SERVING its load balancers are `benchmarks.serving_agent`.

With $SKYSERVE_BENCH_CALLBACKS, writes to that file which callbacks of the event loop took the most CPU at once.

    python -m benchmarks.memory_controller
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from policies.model import Zone
from provisioners.clock import unix_now
from provisioners.offers.zone_offers import ZonePrices
from provisioners.port.base import Instance, LaunchOrder, Provisioner
from skyserve_cli import clouds
from skyserve_cli.controller import daemon
from skyserve_cli.controller.balancers import agent_process as lb_process
from skyserve_cli.controller.reconcile import reconciler
from skyserve_cli.controller.reconcile.ports import AgentOrder
from skyserve_cli.spec import infra
from tests.clouds import fake

PORT = 9000
_ZONES = 12


class ManyMachines(fake.FakeProvisioner):
    """Without limits, and forgetting what was terminated."""

    def __init__(self) -> None:
        zones = [
            Zone(fake.CLOUD, f"r{number // 2}", f"r{number // 2}-{number % 2}") for number in range(_ZONES)
        ]
        prices = tuple(ZonePrices(zone, 0.30 + 0.01 * number, 1.0) for number, zone in enumerate(zones))
        super().__init__(unix_now, prices=prices, boot_s=0.0, setup_s=0.0)
        self._numbers = itertools.count()
        self._number: dict[str, int] = {}
        self._shown: dict[str, Instance] = {}

    def _check(self, order: LaunchOrder) -> None:
        """There is room."""

    def _instance(self, machine: fake._FakeInstance) -> Instance:
        instance = super()._instance(machine)
        number = self._number.get(instance.token)
        if number is None:
            number = self._number[instance.token] = next(self._numbers)
        address = f"127.{1 + number // 62_500}.{number // 250 % 250}.{1 + number % 250}"
        return replace(instance, endpoint=f"http://{address}:{PORT}")

    def terminate(self, instance: Instance) -> None:
        super().terminate(instance)
        with self._lock:
            self._machines.pop(instance.token, None)


def _time_callbacks(file: Path) -> None:
    """Every ten seconds, write for each kind of callback its longest one and the sum in those ten seconds, in CPU ms."""
    run = asyncio.Handle._run
    longest: dict[str, float] = defaultdict(float)
    total: dict[str, float] = defaultdict(float)
    written_at = time.monotonic()

    def timed(self: asyncio.Handle) -> None:
        nonlocal written_at
        started = time.thread_time()
        run(self)
        took_s = time.thread_time() - started
        callback = self._callback  # type: ignore[attr-defined]
        owner = getattr(callback, "__self__", None)
        what = getattr(owner.get_coro() if isinstance(owner, asyncio.Task) else callback, "__qualname__", "?")
        total[what] += took_s
        longest[what] = max(longest[what], took_s)
        if time.monotonic() - written_at >= 10.0:
            worst = sorted(longest, key=lambda one: -longest[one])[:8]
            with file.open("a") as out:
                for one in worst:
                    print(
                        f"{written_at:.0f} {one} {1000 * longest[one]:.1f} {1000 * total[one]:.0f}", file=out
                    )
            longest.clear()
            total.clear()
            written_at = time.monotonic()

    asyncio.Handle._run = timed  # type: ignore[method-assign]


def main() -> int:
    make = clouds.Clouds._make
    tick, one_pass, passed = reconciler.Reconciler.tick, reconciler.Reconciler._pass, list[float]()
    ticks = Path(os.environ["SKYSERVE_BENCH_TICKS"]).open("a", buffering=1)  # noqa: SIM115 - for as long as this lives

    def made(self: clouds.Clouds, name: str) -> Provisioner:
        return ManyMachines() if name == fake.CLOUD else make(self, name)

    def timed(self: reconciler.Reconciler) -> None:
        started, used = time.monotonic(), time.thread_time()
        passed.clear()
        tick(self)
        ended, used = time.monotonic(), time.thread_time() - used
        print(f"{started:.4f} {ended:.4f} {used:.4f} {passed[0] if passed else ended:.4f}", file=ticks)

    def first(self: reconciler.Reconciler, *args: Any) -> Any:
        found = one_pass(self, *args)
        passed.append(time.monotonic())
        return found

    if os.environ.get("SKYSERVE_BENCH_CALLBACKS"):
        _time_callbacks(Path(os.environ["SKYSERVE_BENCH_CALLBACKS"]))
    if os.environ.get("SKYSERVE_BENCH_SERVING"):
        command = lb_process.agent_command

        def serving(order: AgentOrder, token_file: Path, table_file: Path) -> list[str]:
            return [
                "benchmarks.serving_agent" if word == "lb" else word
                for word in command(order, token_file, table_file)
            ]

        lb_process.agent_command = serving
    clouds.Clouds._make = made  # type: ignore[method-assign]
    infra.CLOUDS = (*infra.CLOUDS, fake.CLOUD)  # type: ignore[assignment]
    reconciler.Reconciler.tick = timed  # type: ignore[method-assign]
    reconciler.Reconciler._pass = first  # type: ignore[method-assign, assignment]
    return daemon.main()


if __name__ == "__main__":
    sys.exit(main())
