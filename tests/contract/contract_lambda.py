"""Lambda under the contract."""

from __future__ import annotations

from pathlib import Path

from policies.model import CapacityType, Offer, Zone
from provisioners.contract.machines import PluginSubject
from provisioners.contract.subject import ON_DEMAND
from provisioners.offers.catalog.model import Catalog
from provisioners.plugins import listings_of
from provisioners.port.vm import machine_token
from skyserve_cli.lambda_plugin import PLUGIN, LambdaConfig
from tests.clouds.lambda_labs.lambda_world import KEY, LambdaWorld, serving

REGIONS = ("us-east-1", "us-west-1")


class LambdaSubject(PluginSubject):
    accelerator, accelerator_count = "H100", 2.0
    markets = (ON_DEMAND,)

    def __init__(self, home: Path) -> None:
        self.home = home
        super().__init__()

    def open(self) -> None:
        self.world = LambdaWorld()
        url = self.stack.enter_context(serving(self.world))
        key = self.home / "lambda_keys"
        key.write_text(f"api_key = {KEY}\n")
        self.plugin, self.section = PLUGIN, LambdaConfig(url=url, api_key_file=str(key))
        self.now, self.sleep = lambda: self.world.time, self._pass

    def _pass(self, seconds: float) -> None:
        with self.world.lock:
            self.world.time += seconds

    def listed_types(self) -> Catalog:
        kept = [one for one in listings_of(PLUGIN) if one.region in REGIONS]
        return Catalog(
            tuple(one for one in kept if one.shape.name in ("gpu_1x_h100_sxm5", "gpu_2x_h100_sxm5"))
        )

    def set_room(self, zone: Zone, capacity_type: CapacityType, count: int) -> None:
        self.world.room[zone.region, "gpu_1x_h100_sxm5"] = count

    def preempt_node(self, token: str, rank: int) -> None:
        name = machine_token(token, rank)
        (lost,) = [one["id"] for one in self.world.living() if one["name"].startswith(f"{name}.")]
        self.world.set_state(lost, "preempted")

    def cut_answers(self) -> None:
        self.world.cut = True

    def calm(self) -> None:
        self.world.cut, self.world.key = False, KEY

    def exhaust_quota(self, offer: Offer) -> str:
        self.world.quota = 0
        return "quota of instances"

    def refuse_us(self) -> None:
        self.world.key = "another"

    def throttle(self) -> None:
        self.world.throttled = 3
