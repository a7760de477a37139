"""A plan on the screen: every replica with its place and its price."""

from __future__ import annotations

from collections.abc import Sequence

from provisioners.clock import unix_now
from skyserve_cli.clouds import Clouds
from skyserve_cli.commands.options import View, home
from skyserve_cli.config import load_config
from skyserve_cli.controller.reconcile.mappers import requirements_of
from skyserve_cli.controller.reconcile.planning import first_plan
from skyserve_cli.output import (
    CommandFailed,
    accelerators,
    inform,
    place,
    plural,
    saving,
    usd,
)
from skyserve_cli.spec import Problem, ServiceSpec, SpecError
from skyserve_cli.spec.load import Loaded
from skyserve_cli.text_tables import FittedTable


def listed_plan(spec: ServiceSpec) -> View:
    """Return the plan of a new service at the prices of the catalog, without a controller. Raises CloudNotEnabledError."""
    here = home()
    here.create()
    clouds = Clouds(here, load_config(here.config))
    return first_plan(spec, clouds.listed(requirements_of(spec)), clouds, unix_now())


def plan_table(plan: View) -> FittedTable:
    return FittedTable(
        ("REPLICA", "ZONE", "CAPACITY", "INSTANCE", "ACCELERATOR", "$/H", "WHY"),
        [
            (
                str(launch["replica_id"]),
                place(launch),
                launch["capacity_type"],
                launch["instance_type"],
                accelerators(launch),
                _price(launch),
                launch["why"],
            )
            for launch in plan["launches"]
        ],
    )


def _price(offer: View) -> str:
    """``1.05``, or ``<=1.05`` for a spot price that is not known: it is at most the one on demand."""
    price, most = offer["price_usd_hour"], offer.get("on_demand_usd_hour")
    is_unknown = offer["capacity_type"] == "spot" and price > 0 and price == most
    return f"<={usd(price)}" if is_unknown else usd(price)


def plan_total(plan: View) -> str:
    """Return what the plan costs: ``3 replicas for $1.05 per hour, 68% less than $3.30 on demand.``, and what spreading costs.

    On-demand replicas beyond the target stand in until the others are ready: they are counted apart.
    """
    stand_ins = [each for each in plan["launches"] if each["stands_in"]]
    for_now = sum(launch["price_usd_hour"] for launch in stand_ins)
    paid, on_demand = plan["usd_per_hour"] - for_now, plan["usd_per_hour_on_demand"] - for_now
    said = f"{plural(len(plan['launches']) - len(stand_ins), 'replica')} for ${usd(paid)} per hour"
    if less := saving(paid, on_demand):
        said += f", {less} less than ${usd(on_demand)} on demand"
    if stand_ins:
        said += (
            f"; until they are ready {plural(len(stand_ins), 'on-demand replica')} for ${usd(for_now)} more"
        )
    if agents := plan["load_balancers"]:
        cost = usd(sum(agent["price_usd_hour"] for agent in agents))
        regions = sorted({f"{agent['cloud']}/{agent['region']}" for agent in agents})
        said += f"; {plural(len(agents), 'load balancer')} in {', '.join(regions)} for ${cost} more"
    return " ".join(filter(None, (f"{said}.", extra_cost(plan), spreading_cost(plan))))


def extra_cost(plan: View) -> str:
    """Return a sentence if disks and addresses cost something beyond the machines, else nothing."""
    more = plan.get("beside_usd_per_hour", 0.0)  # a controller of an older release does not say
    said = (
        f"Disks and public addresses cost about ${usd(more)} per hour more; traffic out of a cloud is extra."
    )
    return said if more else ""


def spreading_cost(plan: View) -> str:
    """Return a sentence if it costs something that the replicas are spread over zones, else nothing."""
    found = plan.get("spreading")  # a controller of an older release does not say
    if found is None:
        return ""
    where = f"Spreading over {found['zones']} zones" if found["zones"] > 1 else "Not taking the cheapest zone"
    cheapest = usd(found["usd_per_hour_cheapest_only"])
    more = usd(found["usd_per_hour"])
    return (
        f"{where} costs ${more} per hour: in the cheapest zone alone these replicas would cost ${cheapest}."
    )


def candidates_table(candidates: Sequence[View]) -> FittedTable:
    return FittedTable(
        ("ZONE", "CAPACITY", "INSTANCE", "ACCELERATOR", "$/H"),
        [
            (
                place(each),
                each["capacity_type"],
                each["instance_type"],
                accelerators(each),
                _price(each),
            )
            for each in candidates
        ],
    )


def insist_on_offers(plan: View, loaded: Loaded) -> None:
    """A service that can run nowhere is refused before it is requested, with the keys that leave nothing.

    An alternative without offers beside others that have some is reported. Raises SpecError, or CommandFailed if the reason
    is unknown.
    """
    problems = [
        Problem(loaded.path_of(why["choice"], why["field"]), why["message"], hint=why["hint"])
        for why in plan["refused"]
    ]
    if plan["offers"] > 0:
        for problem in problems:
            inform(f"warning: {problem}")
        return
    if problems:
        raise SpecError(problems)
    if plan["target"] > 0:
        raise CommandFailed(
            f"{plan['name']}: no enabled cloud offers what `resources` asks for; `serve check` lists the clouds"
        )
