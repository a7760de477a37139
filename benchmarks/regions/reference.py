"""The scenarios of the reference tables, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from benchmarks.regions.scenario import (
    EGRESS_USD_PER_GB,
    RTT_MS,
    USD_PER_HOUR,
    Clients,
    Cut,
    Death,
    Pause,
    Region,
    Scenario,
    three,
)

DAY_S = 600.0


def day(
    load: float, replicas: int | Mapping[str, int] = 4, length_s: float = DAY_S, **more: object
) -> Scenario:
    """Return conversations that follow the sun. `replicas` is per region; `load` is a share of the capacity of 12 replicas."""
    options = {"load": load, "length_s": length_s, **more}
    return Scenario("day", three(replicas), RTT_MS, Clients("day", options), count_from_s=length_s / 10)


def idle(length_s: float) -> Scenario:
    return replace(day(0.3, length_s=length_s), name="idle")


def skew(length_s: float) -> Scenario:
    clients = Clients("closed", {"clients": {"us": 120, "eu": 40, "asia": 40}, "length_s": length_s / 2})
    return Scenario("skew", three(), RTT_MS, clients, closed_loop=True)


def trees(length_s: float) -> Scenario:
    number = max(1, round(4 * length_s / DAY_S))
    clients = Clients("trees", {"clients": {"us": 40, "eu": 20, "asia": 20}, "trees": number})
    return Scenario("trees", three(), RTT_MS, clients, closed_loop=True)


def mixed(length_s: float) -> Scenario:
    number = max(1, round(4 * length_s / DAY_S))
    options = {
        "clients": {"us": 20, "eu": 20, "asia": 20},
        "four_branches": {"us": 2, "eu": 0, "asia": 0},
        "trees": number,
    }
    return Scenario("mixed", three(), RTT_MS, Clients("trees", options), closed_loop=True)


def death(length_s: float) -> Scenario:
    """The agent of eu is dead for a fifth of the day."""
    at_s = length_s / 3
    dead = Death("eu", at_s, at_s + length_s / 5)
    return replace(day(0.75, length_s=length_s), name="death", deaths=(dead,))


def death_without_adoption(length_s: float) -> Scenario:
    base = death(length_s)
    dead = tuple(replace(one, adopted_after_s=None) for one in base.deaths)
    return replace(base, name="death without adoption", deaths=dead)


def pinned(length_s: float) -> Scenario:
    """Clients of eu are served in eu; all others anywhere."""
    stay = {"eu": frozenset({"eu"})}
    return replace(day(0.85, length_s=length_s), name="eu pinned", stay=stay)


def beats(report_s: float) -> Callable[[float], Scenario]:
    def made(length_s: float) -> Scenario:
        name = f"report every {report_s:g} s"
        return replace(day(0.85, length_s=length_s), name=name, report_s=report_s)

    return made


def sized(count: int) -> Callable[[float], Scenario]:
    """The same demand, with `count` replicas as even as possible over the regions."""

    def made(length_s: float) -> Scenario:
        names = ("us", "eu", "asia")
        replicas = {name: count // 3 + (index < count % 3) for index, name in enumerate(names)}
        return replace(day(0.85, replicas, length_s), name=f"{count} replicas")

    return made


def roaming(length_s: float) -> Scenario:
    return replace(day(0.7, length_s=length_s, roam=0.5), name="roaming")


def one_way(length_s: float) -> Scenario:
    """Nothing passes from us to eu for a fifth of the day."""
    cut = Cut("us", "eu", length_s / 3, length_s / 3 + length_s / 5)
    return replace(day(0.85, length_s=length_s), name="one-way partition", cuts=(cut,))


def unlike(load: float) -> Callable[[float], Scenario]:
    """One A100, which does as much as six L4, in us, and six L4 elsewhere."""

    def made(length_s: float) -> Scenario:
        us = Region("us", 0, USD_PER_HOUR["us"], EGRESS_USD_PER_GB["us"], engines={"a100-7b": 1})
        regions = (us, *three(3)[1:])
        base = day(load, length_s=length_s)
        name = f"A100 and 6 L4, load {load:g}"
        return replace(base, name=name, regions=regions, report_s=0.5, ends_at_s=length_s)

    return made


# Round trips of Sao Paulo and Sydney beside those above, in milliseconds, rounded.
_FIVE_RTT_MS = {
    **RTT_MS,
    ("us", "sa"): 120.0,
    ("us", "au"): 200.0,
    ("eu", "sa"): 190.0,
    ("eu", "au"): 270.0,
    ("asia", "sa"): 270.0,
    ("asia", "au"): 110.0,
    ("sa", "au"): 310.0,
}


def uneven(load: float) -> Callable[[float], Scenario]:
    """Five regions with as many clients each, of 6, 3, 2, 1 and no replicas, over links with jitter."""

    def made(length_s: float) -> Scenario:
        sizes = {"us": 6, "eu": 3, "asia": 2, "sa": 1, "au": 0}
        regions = tuple(Region(name, count) for name, count in sizes.items())
        clients = Clients("day", {"load": load, "length_s": length_s})
        name = f"6/3/2/1/0 replicas, load {load:g}"
        return Scenario(
            name,
            regions,
            _FIVE_RTT_MS,
            clients,
            report_s=0.5,
            jitter=0.2,
            count_from_s=length_s / 10,
            ends_at_s=length_s,
        )

    return made


def crowd(length_s: float) -> Scenario:
    """Five times as many new conversations in eu for a tenth of the day."""
    at_s = length_s / 3
    about = {"region": "eu", "at_s": at_s, "until_s": at_s + length_s / 10, "times": 5.0}
    return replace(day(0.6, length_s=length_s, crowds=[about]), name="flash crowd")


def paused(length_s: float) -> Scenario:
    """The agent of eu is stopped for 20 s."""
    at_s = length_s / 3
    return replace(day(0.75, length_s=length_s), name="pause", pauses=(Pause("eu", at_s, at_s + 20.0),))


def two_agents(length_s: float) -> Scenario:
    regions = tuple(replace(region, agents=2) for region in three())
    return replace(day(0.85, length_s=length_s), name="two agents per region", regions=regions)


def alone(agents: int, load: float = 0.7) -> Callable[[float], Scenario]:
    """One region, whose agents get each request by chance."""

    def made(length_s: float) -> Scenario:
        region = Region("us", 12, USD_PER_HOUR["us"], EGRESS_USD_PER_GB["us"], agents=agents)
        base = day(load, length_s=length_s)
        name = f"one region, {agents} agents"
        return replace(base, name=name, regions=(region,), spread=True)

    return made


SCENARIOS: Mapping[str, Callable[[float], Scenario]] = {
    "idle": idle,
    "day": lambda length_s: day(0.85, length_s=length_s),
    "skew": skew,
    "trees": trees,
    "mixed": mixed,
    "death": death,
    "death-alone": death_without_adoption,
    "pinned": pinned,
    "report-0.1": beats(0.1),
    "report-2": beats(2.0),
    "report-5": beats(5.0),
    "replicas-9": sized(9),
    "replicas-11": sized(11),
    "replicas-12": sized(12),
    "replicas-13": sized(13),
    "replicas-14": sized(14),
    "roaming": roaming,
    "one-way": one_way,
    "unlike": unlike(0.7),
    "unlike-hot": unlike(1.0),
    "uneven": uneven(0.6),
    "uneven-hot": uneven(0.85),
    "crowd": crowd,
    "pause": paused,
    "agents-2": two_agents,
    "alone-1": alone(1),
    "alone-3": alone(3),
}
