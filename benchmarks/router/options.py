"""The options of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.router import run
from benchmarks.router.cells import BY_NAME, EXTRA
from benchmarks.router.keys import NO_KEYS, Keys

TLS = {
    "none": frozenset[str](),
    "targets": frozenset({"targets"}),
    "clients": frozenset({"clients"}),
    "both": frozenset({"targets", "clients"}),
}
AGENTS = {"local": ("local",), "regional": ("regional",), "both": ("local", "regional")}
_MOST_WORKERS = 256


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what is wanted. TLS that is not given depends on the agent: regions have it to their targets."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.agent == "regional" and (given.also or given.variant):
        parser.error("--also and --variant are of local agents: use --agent local or both")
    if given.tls is None:
        given.tls = "targets" if given.agent == "regional" else "none"
    return given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description=run.__doc__)
    traffic = parser.add_argument_group("traffic").add_argument
    cells = ", ".join(f"({name})" if name in EXTRA else name for name in BY_NAME)
    traffic(
        "--only",
        type=_cells,
        default=[],
        metavar="CELL,...",
        help=f"{cells}; those in brackets only if named",
    )
    traffic("--tls", choices=list(TLS), help="where TLS is (default: none; with --agent regional, targets)")
    traffic(
        "--keys",
        type=_keys,
        default=NO_KEYS,
        metavar="none|open|limited|N",
        help="our agent requires an API key: one without limits, one with limits, or N with limits, which come in "
        "turn; the limits are not reached (default: %(default)s)",
    )
    _add_own(parser)
    _add_rest(parser)
    return parser


def _add_own(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("our agent").add_argument
    own(
        "--agent",
        choices=list(AGENTS),
        default="local",
        help="from its command line, as the controller runs it in a region, or both (default: %(default)s)",
    )
    own(
        "--policy",
        default="round_robin",
        help="outside of the prefix cells; with another one, nginx and Envoy choose by the fewest requests (default: %(default)s)",
    )
    own("--interpreted", action="store_true", help="as an editable install runs it, not compiled")
    own(
        "--also",
        type=_pair,
        default=[],
        action="append",
        metavar="LABEL=CHECKOUT",
        help="another checkout, local",
    )
    own(
        "--variant",
        type=_pair,
        default=[],
        action="append",
        metavar="LABEL=ARGUMENTS",
        help="local, with arguments",
    )


def _add_rest(parser: argparse.ArgumentParser) -> None:
    systems = parser.add_argument_group("systems").add_argument
    systems(
        "--systems",
        type=_names,
        default=[],
        metavar="NAME,...",
        help="skyserve or regional, with -off, -nameless, -keyed or -gorgo; the Rust routers, envoy, nginx, direct; labels",
    )
    systems("--no-peer-metrics", action="store_true", help="the Rust routers without their Prometheus port")
    systems(
        "--workers",
        type=_workers,
        default=1,
        metavar="N",
        help="threads that move bytes, of our agent, Envoy and the Rust routers, and processes of nginx. More than one: "
        "nothing is pinned to a core, and our agent has to know the option --workers (default: %(default)s)",
    )

    systems(
        "--mover-share",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="give each thread of our agent that moves bytes only this share of a core, so that a few cores show how "
        "several add up; needs root and control groups of version 1",
    )

    rounds = parser.add_argument_group("rounds").add_argument
    rounds("--rounds", type=int, default=5, help="(default: %(default)s)")
    rounds("--seconds", type=float, default=5.0, help="that are counted, per cell (default: %(default)s)")
    rounds("--quick", action="store_true", help="one round of 2 seconds per cell: does it all run?")
    rounds("--seed", type=int, default=0, help="of the order of systems (default: %(default)s)")

    results = parser.add_argument_group("results").add_argument
    results("--json", type=Path, metavar="FILE", help="keep every row")
    results("--show", type=Path, metavar="FILE", help="print the tables of such a file, and measure nothing")
    results("--check", action="store_true", help="exit with 1 if a goal is not reached")


def _pair(text: str) -> tuple[str, str]:
    label, equals, rest = text.partition("=")
    if not (label and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not LABEL=...")
    return label, rest


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _cells(text: str) -> list[str]:
    unknown = set(_names(text)) - BY_NAME.keys()
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return _names(text)


def _keys(text: str) -> Keys:
    try:
        return Keys.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _workers(text: str) -> int:
    workers = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= workers <= _MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_MOST_WORKERS}")
    return workers
