"""Meadow under the contract: `--skyserve-cloud=meadow.testing:MeadowSubject`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from meadow import PLUGIN, MeadowConfig
from meadow.fake import KEY, World, serving
from policies.model import CapacityType, Offer, Zone
from provisioners.contract.machines import PluginSubject
from provisioners.port.vm import machine_token


class MeadowSubject(PluginSubject):
    accelerator, accelerator_count = "L4", 2.0

    def open(self) -> None:
        self.world = World()
        url = self.stack.enter_context(serving(self.world))
        key = Path(self.stack.enter_context(tempfile.TemporaryDirectory())) / "key"
        key.write_text(KEY)
        self.plugin, self.section = PLUGIN, MeadowConfig(api_key_file=str(key), url=url)
        self.now = lambda: self.world.time

    def sleep(self, seconds: float) -> None:  # type: ignore[override]
        self.world.time += seconds

    def set_room(self, zone: Zone, capacity_type: CapacityType, count: int) -> None:
        self.world.room[zone.name, capacity_type is CapacityType.SPOT] = count

    def preempt_node(self, token: str, rank: int) -> None:
        name = machine_token(token, rank)
        (lost,) = [one["id"] for one in self.world.living() if one["name"].startswith(f"{name}.")]
        self.world.end(lost, "reclaimed")

    def cut_answers(self) -> None:
        self.world.cut = True

    def calm(self) -> None:
        self.world.cut, self.world.key = False, KEY

    def exhaust_quota(self, offer: Offer) -> str:
        self.world.quota = 0
        return "MACHINES"

    def refuse_us(self) -> None:
        self.world.key = "another"

    def throttle(self) -> None:
        self.world.throttled = 3
