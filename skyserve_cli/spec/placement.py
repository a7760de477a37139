"""Which placer a service gets, from the keys of its `replica_policy` and its resources. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from policies.goals import PlacementGoal
from skyserve_cli.spec.model import ResourceChoice

#: Names that mean another placer: SkyPilot's name for SpotHedge. Not in `policies.registry`, which imports all placers.
ALIASES: Mapping[str, str] = {"dynamic_fallback": "spothedge"}

#: What `spot_placer: auto` stands for.
AUTO = "risk_hedge"


def placement_of(
    knobs: PlacementGoal,
    resources: Sequence[ResourceChoice],
    *,
    spot_placer: str | None = None,
    dynamic_ondemand_fallback: bool | None = None,
) -> PlacementGoal:
    """Return `knobs` with the placer that they lead to. Its own outcome again gives the same.

    Without `spot_placer`, a file that gives a knob gets the placer which that knob belongs to, and one that
    gives none is spread plainly. A service without spot replicas leaves nothing to hedge.
    """
    if not any(choice.use_spot for choice in resources):
        return replace(
            knobs,
            placer="spread",
            dynamic_ondemand_fallback=False,
            base_ondemand_fallback_replicas=0,
            availability_target=None,
        )
    aims, stands_in = knobs.availability_target is not None, dynamic_ondemand_fallback
    placer = spot_placer
    chooses = aims or placer in ("auto", "risk_hedge")  # leaves the capacity to the placer
    if placer is None and (stands_in or knobs.base_ondemand_fallback_replicas) and not aims:
        placer = "dynamic_fallback"
    if placer is None:
        placer = "auto" if aims else "spread"
    if placer == "auto":
        placer = "dynamic_fallback" if knobs.num_overprovision else AUTO
    return replace(
        knobs,
        placer=ALIASES.get(placer, placer),
        dynamic_ondemand_fallback=chooses if stands_in is None else stands_in,
    )
