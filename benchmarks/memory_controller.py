"""The production daemon over a cloud in memory, whose machines come up at once and all respond on a port of an address of their
own (127.x.y.z). Appends the instant of every tick's beginning and end to the file $SKYSERVE_BENCH_TICKS.

    python -m benchmarks.memory_controller
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from policies.model import Zone
from provisioners import fake
from provisioners.base import Instance, LaunchOrder, Provisioner
from provisioners.clock import unix_now
from provisioners.offering import ZonePrices
from skyserve_cli import clouds
from skyserve_cli.controller import daemon, reconciler

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

    def _instance(self, machine: fake._Machine) -> Instance:
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


def main() -> int:
    make = clouds.Clouds._make
    tick = reconciler.Reconciler.tick
    ticks = Path(os.environ["SKYSERVE_BENCH_TICKS"]).open("a", buffering=1)  # noqa: SIM115 - for as long as this lives

    def made(self: clouds.Clouds, name: str) -> Provisioner:
        return ManyMachines() if name == fake.CLOUD else make(self, name)

    def timed(self: reconciler.Reconciler) -> None:
        started = time.monotonic()
        tick(self)
        print(f"{started:.4f} {time.monotonic():.4f}", file=ticks)

    clouds.Clouds._make = made  # type: ignore[method-assign]
    reconciler.Reconciler.tick = timed  # type: ignore[method-assign]
    return daemon.main()


if __name__ == "__main__":
    sys.exit(main())
