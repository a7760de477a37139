"""Many simulated services under a hostile cloud, a restless user and a controller that keeps being killed.

    python benchmarks/torture.py [--first 0] [--seeds 2000] [--jobs 2] [--twice] [--pair | --slo]

Every life ends in peace, in which the fleet must come to what the goals say and then to rest; the invariants of
`tests.kit.invariants` hold after every tick. With `--twice` each seed is lived a second time and must tell the
same story to the letter. With `--pair` two controllers share the database: each is frozen, cut off from it and killed, and
the database's clock is set; no commit of an earlier term may follow one of a later. With `--slo` every service has an SLO, and an
hour of changing demand decides its size. Exit code 1 if any invariant was broken.
"""

from __future__ import annotations

import argparse
import logging
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.kit.controller_pair import PairLife
from tests.kit.invariants import InvariantError
from tests.kit.life import Life, Outcome, run_seed
from tests.kit.slo_life import SloLife

SLO_BUSY_S = 3600.0  # of changing demand, where minutes decide


def live(seed: int, *, twice: bool, pair: bool, slo: bool) -> Outcome | str:
    """The outcome of a seed, or the sentence that says what it broke."""
    try:
        run = partial(run_seed, seed, life=PairLife if pair else Life)
        if slo:
            run = partial(run_seed, seed, life=SloLife, busy_s=SLO_BUSY_S)
        outcome = run()
        if twice and run().digest != outcome.digest:
            return f"seed {seed}: a second run gave a different event log"
    except InvariantError as error:
        return str(error)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--twice", action="store_true")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--pair", action="store_true")
    kind.add_argument("--slo", action="store_true")
    args = parser.parse_args()
    logging.disable()
    broken, ticks, crashes, launches = 0, 0, 0, 0
    seeds = range(args.first, args.first + args.seeds)
    with ProcessPoolExecutor(args.jobs) as pool:
        for done, result in enumerate(
            pool.map(partial(live, twice=args.twice, pair=args.pair, slo=args.slo), seeds, chunksize=4), 1
        ):
            if isinstance(result, str):
                broken += 1
                print(f"BROKEN {result}", flush=True)
            else:
                ticks, crashes = ticks + result.ticks, crashes + result.crashes
                launches += result.launches
            if sys.stderr.isatty() or done % 100 == 0:
                print(f"\r{done} of {args.seeds} seeds, {broken} broken", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(
        f"{args.seeds} seeds, {broken} broken; {ticks} ticks, {crashes} crashes of the controller, "
        f"{launches} instances made"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
