"""What SkyWalker and GORGO have published of several regions, beside the same comparison here: `python -m benchmarks.regions papers`.

SkyWalker (EuroSys 2026), section 5.1: up to 12 L4 in us, eu and asia; conversations of Chatbot Arena (80 clients per region) and
of WildChat (40, 30, 30), trees of thought (40, 20, 20) and mixed trees. Its figure 8 has bars, of which the text gives ranges;
figure 10 compares it with regions that do not help each other (120, 40 and 40 clients, replicas spread evenly). GORGO (2026), tables 2
to 5: three regions of A100 and ten requests in flight for a minute.

Conversations are drawn as in `benchmarks.regions.workloads`, where no files are given; the engines are models. So a factor is to be
compared with a factor, and no second with a second. GKE's gateway is not among the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.regions.measure import Figures
from benchmarks.regions.reference import mixed, trees
from benchmarks.regions.scenario import RTT_MS, Clients, Region, Scenario, three

Runs = Mapping[str, Mapping[str, Figures]]  # by scenario and rule
CENTRAL = ("central_rr", "central_ll", "central_ch", "central_sgl")
SKYWALKER_RULES = (*CENTRAL, "skywalker_ch", "skywalker", "one_cost")
GORGO_RULES = ("central_ll", "skywalker", "gorgo", "central_gorgo", "one_cost")
SKEW_RULES = ("local", "skywalker", "one_cost")
MINUTE_S = 60.0
# Israel is GORGO's third region: round trips of cloud regions in Oregon, Frankfurt and Tel Aviv, rounded.
_GORGO_RTT_MS = {("us", "eu"): 140.0, ("us", "me"): 190.0, ("eu", "me"): 55.0}


class Claim(NamedTuple):
    """A figure that was published, as text, and the same of our runs: `ours` returns its lowest and its highest value."""

    source: str
    what: str
    published: str
    ours: Callable[[Runs], tuple[float, float]]
    form: str = ".2f"


# Of WildChat, by region: those that have most of its conversations.
COUNTRIES: Mapping[str, Sequence[str]] = {
    "us": ("United States", "Canada", "Mexico", "Brazil", "Argentina", "Chile"),
    "eu": (
        "United Kingdom", "Germany", "France", "Italy", "Spain", "Netherlands", "Poland", "Sweden", "Switzerland",
        "Russia", "Ukraine", "Turkey", "Romania", "Portugal", "Belgium", "Austria", "Ireland", "Finland", "Norway",
    ),
    "asia": (
        "China", "Hong Kong", "Taiwan", "Japan", "South Korea", "India", "Indonesia", "Philippines", "Singapore",
        "Vietnam", "Thailand", "Malaysia", "Australia",
    ),
}  # fmt: skip


def scenarios(
    length_s: float, arena: Path | None = None, wildchat: Path | None = None
) -> dict[str, tuple[Scenario, Sequence[str]]]:
    """Returns the scenarios with their rules; closed loops last `length_s`. Files of conversations are used where they are given."""
    found: dict[str, tuple[Scenario, Sequence[str]]] = {
        "arena": (_talks("arena", (80, 80, 80), length_s, arena, {}), SKYWALKER_RULES),
        "wildchat": (_talks("wildchat", (40, 30, 30), length_s, wildchat, COUNTRIES), SKYWALKER_RULES),
        "trees": (trees(length_s), SKYWALKER_RULES),
        "mixed": (mixed(length_s), SKYWALKER_RULES),
    }
    for count in (6, 9, 12):
        clients = Clients("closed", {"clients": {"us": 120, "eu": 40, "asia": 40}, "length_s": length_s})
        skewed = Scenario(f"skew {count}", three(count // 3), RTT_MS, clients, closed_loop=True)
        found[skewed.name] = (skewed, SKEW_RULES)
    found["gorgo"] = (_gorgo(min(length_s, MINUTE_S)), GORGO_RULES)
    return found


def _talks(
    name: str,
    clients: tuple[int, int, int],
    length_s: float,
    path: Path | None,
    countries: Mapping[str, Sequence[str]],
) -> Scenario:
    by_region = dict(zip(("us", "eu", "asia"), clients, strict=True))
    options: dict[str, object] = {"clients": by_region, "length_s": length_s}
    if path is None:
        return Scenario(name, three(), RTT_MS, Clients("closed", options), closed_loop=True)
    options |= {"path": str(path), "format": name, "countries": countries}
    return Scenario(name, three(), RTT_MS, Clients("recorded", options), closed_loop=True)


def _gorgo(length_s: float) -> Scenario:
    base = _talks("wildchat", (4, 3, 3), length_s, None, {})
    regions = tuple(Region(name, engines={"a100-7b": 1}) for name in ("us", "eu", "me"))
    options = {**base.clients.options, "clients": {"us": 4, "eu": 3, "me": 3}}
    return replace(
        base,
        name="gorgo",
        regions=regions,
        rtt_ms=_GORGO_RTT_MS,
        clients=replace(base.clients, options=options),
    )


def _tokens(
    scenario_names: Sequence[str], rules: Sequence[str], than: Sequence[str]
) -> Callable[[Runs], tuple[float, float]]:
    """Compare tokens per second of rules with those of others."""

    def ours(runs: Runs) -> tuple[float, float]:
        return _range(
            runs[name][rule].tokens_per_s / runs[name][other].tokens_per_s
            for name in scenario_names
            for rule in rules
            for other in than
        )

    return ours


def _range(values: Iterable[float]) -> tuple[float, float]:
    found = sorted(values)
    return found[0], found[-1]


def _hits(scenario_names: Sequence[str], rules: Sequence[str]) -> Callable[[Runs], tuple[float, float]]:
    return lambda runs: _range(100 * runs[name][rule].hit_rate for name in scenario_names for rule in rules)


def _waits(
    scenario_names: Sequence[str], rule: str, than: Sequence[str], share: str
) -> Callable[[Runs], tuple[float, float]]:
    """Compare a quantile of the time to the first token of others with that of a rule: above 1 the rule is faster."""

    def ours(runs: Runs) -> tuple[float, float]:
        return _range(
            getattr(runs[name][other], share) / getattr(runs[name][rule], share)
            for name in scenario_names
            for other in than
        )

    return ours


_TALKS = ("arena", "wildchat")
_TREES = ("trees", "mixed")
_ALL = (*_TALKS, *_TREES)
_FIG_8 = "SkyWalker, fig. 8"
_FIG_10 = "SkyWalker, fig. 10"
_GORGO = "GORGO, tables 2 to 5"
CLAIMS: tuple[Claim, ...] = (
    Claim(_FIG_8, "tokens/s of both variants, of a central balancer's, conversations", "1.12-1.2", _tokens(_TALKS, ("skywalker", "skywalker_ch"), CENTRAL)),
    Claim(_FIG_8, "tokens/s of a central LL, of SkyWalker's, conversations", "0.97", _tokens(_TALKS, ("central_ll",), ("skywalker",))),
    Claim(_FIG_8, "hit rate of RR, %, conversations", "10.8-16.6", _hits(_TALKS, ("central_rr",)), ".1f"),
    Claim(_FIG_8, "hit rate of LL, %, conversations", "28.3-31.1", _hits(_TALKS, ("central_ll",)), ".1f"),
    Claim(_FIG_8, "hit rate of SkyWalker, %, conversations", "37.0-46.6", _hits(_TALKS, ("skywalker", "skywalker_ch")), ".1f"),
    Claim(_FIG_8, "tokens/s of CH, of SkyWalker's, equal trees", "1.02", _tokens(("trees",), ("central_ch",), ("skywalker",))),
    Claim(_FIG_8, "tokens/s of CH, of LL's, equal trees", "1.4", _tokens(("trees",), ("central_ch",), ("central_ll",))),
    Claim(_FIG_8, "hit rate of LL and RR, %, trees", "58.7-59.3", _hits(_TREES, ("central_ll", "central_rr")), ".1f"),
    Claim(_FIG_8, "hit rate of SkyWalker, %, trees", "89.6-90.0", _hits(_TREES, ("skywalker",)), ".1f"),
    Claim(_FIG_8, "tokens/s of SkyWalker, of SkyWalker-CH's", "1.01-1.08", _tokens(_ALL, ("skywalker",), ("skywalker_ch",))),
    Claim(_FIG_8, "TTFT p50 of others, of SkyWalker's", "1.74-6.30", _waits(_ALL, "skywalker", CENTRAL, "ttft_p50")),
    Claim(_FIG_8, "TTFT p90 of others, of SkyWalker's", "4.28-9.92", _waits(_ALL, "skywalker", CENTRAL, "ttft_p90")),
    Claim("ours", "tokens/s of one_cost, of a central balancer's", "", _tokens(_ALL, ("one_cost",), CENTRAL)),
    Claim("ours", "tokens/s of one_cost, of SkyWalker's", "", _tokens(_ALL, ("one_cost",), ("skywalker",))),
    Claim("ours", "TTFT p90 of SkyWalker, of one_cost's", "", _waits(_ALL, "one_cost", ("skywalker",), "ttft_p90")),
    Claim(_FIG_10, "tokens/s of SkyWalker, of regions alone, 6 to 12 replicas", "1.07-1.18", _tokens(("skew 6", "skew 9", "skew 12"), ("skywalker",), ("local",))),
    Claim(_FIG_10, "tokens/s of SkyWalker with 9 replicas, of regions alone with 12", "about 1", lambda runs: (fewer(runs, "skywalker"),) * 2),
    Claim("ours", "tokens/s of one_cost, of regions alone, 6 to 12 replicas", "", _tokens(("skew 6", "skew 9", "skew 12"), ("one_cost",), ("local",))),
    Claim("ours", "tokens/s of one_cost with 9 replicas, of regions alone with 12", "", lambda runs: (fewer(runs, "one_cost"),) * 2),
    Claim(_GORGO, "TTFT p50 of least load, of GORGO-proxy's", "2.53", _waits(("gorgo",), "central_gorgo", ("central_ll",), "ttft_p50")),
    Claim(_GORGO, "TTFT p50 of the prefix tree, of GORGO-proxy's", "2.51", _waits(("gorgo",), "central_gorgo", ("skywalker",), "ttft_p50")),
    Claim(_GORGO, "TTFT p50 of GORGO, of GORGO-proxy's", "2.40", _waits(("gorgo",), "central_gorgo", ("gorgo",), "ttft_p50")),
    Claim("ours", "TTFT p50 of GORGO-proxy, of one_cost's", "", _waits(("gorgo",), "one_cost", ("central_gorgo",), "ttft_p50")),
)  # fmt: skip


def fewer(runs: Runs, rule: str) -> float:
    """Return tokens per second of a rule with nine replicas, of those of regions alone with twelve."""
    return runs["skew 9"][rule].tokens_per_s / runs["skew 12"]["local"].tokens_per_s


def rows(runs: Runs) -> list[list[str]]:
    """Returns the claims beside the figures of our runs."""
    found = []
    for claim in CLAIMS:
        lowest, highest = (format(value, claim.form) for value in claim.ours(runs))
        ours = lowest if lowest == highest else f"{lowest}-{highest}"
        found.append([claim.source, claim.what, claim.published, ours])
    return found
