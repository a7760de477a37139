"""Which systems take part in a run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks.router.cells import PREFIX_CELLS, STREAM_CELLS
from benchmarks.router.envoy import envoy
from benchmarks.router.keys import LIMITED
from benchmarks.router.machine import Missing
from benchmarks.router.nginx import direct, nginx
from benchmarks.router.options import AGENTS
from benchmarks.router.ours import ours
from benchmarks.router.run import say
from benchmarks.router.rust_routers import RUST_ROUTERS, rust_router
from benchmarks.router.systems import System

_KEYED_CELLS = frozenset({"unary", "light", "streams250"})

Makers = Mapping[str, Callable[[], System]]


def chosen(given: argparse.Namespace) -> list[System]:
    """The chosen systems that this machine can run; missing ones are reported. Raises Missing for a name that there is not."""
    systems, found = [], makers(given)
    if unknown := set(given.systems) - found.keys():
        raise Missing(f"no system {', '.join(sorted(unknown))}; there are {', '.join(found)}")
    for name, make in found.items():
        if given.systems and name not in given.systems:
            continue
        try:
            systems.append(make())
        except Missing as missing:
            say(f"without {name}: {missing}")
    return systems


def makers(given: argparse.Namespace) -> Makers:
    """What each system is made by, by its name."""
    found: dict[str, Callable[[], System]] = {}
    for agent in AGENTS[given.agent]:
        found |= _local(given) if agent == "local" else _regional(given)
    by_fewest = given.policy != "round_robin"
    found |= {name: partial(rust_router, name, not given.no_peer_metrics) for name in RUST_ROUTERS}
    return {**found, "envoy": partial(envoy, by_fewest), "nginx": partial(nginx, by_fewest), "direct": direct}


def _local(given: argparse.Namespace) -> Makers:
    """Our agent from its command line, and what else has a goal: each mode of continuation, API keys, the other prefix
    policy. The nameless engines are for comparison with those of vLLM's shape."""
    make = partial(ours, native=not given.interpreted, plain=given.policy, keys=given.keys)
    found = _configurations("skyserve", make, partial(make, arguments=("--continue", "off")), given)
    for label, folder in given.also:
        checkout = Path(folder).resolve()
        found[label] = partial(ours, label, checkout, plain=given.policy, keys=given.keys)
    for label, text in given.variant:
        found[label] = partial(make, label, arguments=text.split())
    return found


def _regional(given: argparse.Namespace) -> Makers:
    """The same as the controller runs it in a region."""
    # The controller's code is only needed for it.
    from benchmarks.router.regional import regional

    make = partial(regional, native=not given.interpreted, plain=given.policy, keys=given.keys)
    linked = {"regional-linked": partial(make, "regional-linked", has_sibling=True)}
    return _configurations("regional", make, partial(make, continuation="off"), given) | linked


def _configurations(
    name: str,
    make: Callable[..., System],
    without_continuation: Callable[..., System],
    given: argparse.Namespace,
) -> dict[str, Callable[[], System]]:
    found: dict[str, Callable[[], System]] = {
        name: partial(make, name),
        f"{name}-off": partial(without_continuation, f"{name}-off", cells=STREAM_CELLS),
        f"{name}-nameless": partial(make, f"{name}-nameless", cells=STREAM_CELLS | {"unary"}, nameless=True),
        f"{name}-gorgo": partial(make, f"{name}-gorgo", prefix="gorgo", cells=PREFIX_CELLS),
    }
    if not given.keys.count:
        found[f"{name}-keyed"] = partial(make, f"{name}-keyed", cells=_KEYED_CELLS, keys=LIMITED)
    return found
