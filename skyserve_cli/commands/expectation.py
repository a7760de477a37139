"""What a service may expect of a spot market: its own policy, run once over a trace."""

from __future__ import annotations

from typing import NamedTuple

from skyserve_cli.commands import runs
from skyserve_cli.commands.durations import seconds
from skyserve_cli.commands.options import View
from skyserve_cli.commands.racing import run_all
from skyserve_cli.output import CommandFailed, plural, saving, span, usd
from skyserve_cli.sim.settings import Job, Setting
from skyserve_cli.sim.trace import TICK_S
from skyserve_cli.spec import ServiceSpec


class Expected(NamedTuple):
    """`n_target` replicas over `days` of a trace.

    `usd_per_hour` and what the target costs on demand are at the plan's prices; None where the plan launches nothing.
    """

    trace: str
    days: float
    policy: str
    n_target: int
    availability: float
    cost_relative: float
    usd_per_hour: float | None
    usd_per_hour_on_demand: float | None

    def sentence(self) -> str:
        """Return the expectation as a sentence.

        ``Expected on aws1 (10d 23h, spothedge): 3 replicas ready 99.1% of the time for $1.61 per hour, …``
        """
        ready = (
            f"Expected on {self.trace} ({span(self.days * 86400)}, {self.policy}): "
            f"{plural(self.n_target, 'replica')} ready {self.availability:.2%} of the time"
        )
        if self.usd_per_hour is None or self.usd_per_hour_on_demand is None:
            return f"{ready} for {self.cost_relative:.1%} of the on-demand cost."
        less = saving(self.usd_per_hour, self.usd_per_hour_on_demand)
        compared = f", {less} less than ${usd(self.usd_per_hour_on_demand)} on demand" if less else ""
        return f"{ready} for ${usd(self.usd_per_hour)} per hour{compared}."


def prepared(spec: ServiceSpec, *, trace: str, cold_start: str, price_ratio: str) -> tuple[Setting, Job]:
    """Return the run that stands for the file's policy, at its smallest size. Raises WrongUsage."""
    cold_start_s = seconds("--cold-start", cold_start)
    market = runs.market(trace, None, TICK_S)
    runs.windows(market, None, cold_start_s)  # which insists on a trace longer than a cold start
    n_target = runs.target_size(spec, None)
    setting = Setting(
        trace=market,
        n_target=n_target,
        cold_start_s=cold_start_s,
        price_ratio=runs.prices(market, price_ratio)[0],
        spec=runs.sized(spec, n_target),
    )
    extras, targets = runs.wanted_overprovisions(spec, None), runs.wanted_availabilities(spec, None)
    (job, *_) = runs.jobs(runs.wanted_policies(spec, None), extras, targets, (0,))
    return setting, job


def expected(setting: Setting, job: Job, plan: View) -> Expected:
    """Return what the run comes to, at the prices of the plan. Raises CommandFailed."""
    found, interrupted = run_all([setting], [job], 1, drawn=False)
    if interrupted:
        raise CommandFailed("interrupted; the plan stands without its expectation", 130)
    (run,) = found
    launches = len(plan["launches"])
    on_demand = setting.n_target * plan["usd_per_hour_on_demand"] / launches if launches else None
    return Expected(
        trace=setting.trace.name,
        days=round(run.days, 3),
        policy=run.label,
        n_target=setting.n_target,
        availability=round(run.availability, 6),
        cost_relative=round(run.cost_relative, 6),
        usd_per_hour=None if on_demand is None else round(run.cost_relative * on_demand, 6),
        usd_per_hour_on_demand=None if on_demand is None else round(on_demand, 6),
    )
