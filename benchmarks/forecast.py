"""The demand forecast against persistence, on recorded requests.

    python -m benchmarks.forecast TRACE... [--share 0.9]

TRACE is a recording that `serve simulate --requests` takes, in bins of at least ten minutes. The first half of it is
history; the model is fitted again every day. Persistence says that the next window will be like the last one, and its
quantiles are those of the changes in the history.

Columns, for the mean of the next window and of the one after it: `ape` is the mean absolute error relative to the truth,
`cover` the share of windows at or below the quantile `--share`, `pinball` the loss of that quantile in percent of the mean.
Windows in which the recording has a hole (see `skyserve_cli.sim.slo_queue`) are missing to the model and not judged. The last
row is white noise: a Poisson process with a fixed rate.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from policies.forecast.demand import DAY_MIN, Floats, Horizon, fit
from skyserve_cli.sim.arrivals import load_arrivals
from skyserve_cli.sim.slo_queue import BUSY, EMPTY

STEP_MIN = 10
NOISE_MEAN = 9600


def windows(path: Path) -> Floats:
    """Requests by window; NaN where a busy recording has none."""
    recording = load_arrivals(path)
    step_s = 60.0 * STEP_MIN
    counts = np.diff(
        [recording.count(0.0, index * step_s) for index in range(int(recording.length_s // step_s) + 1)]
    )
    series: Floats = counts.astype(float)
    mean = series.mean()
    holes = series < EMPTY * mean
    if np.median(series) > BUSY * mean:
        series[holes] = np.nan
    return series


def row(name: str, series: Floats, share: float) -> str:
    cells = [f"{name:32.32}"]
    for lead in (1, 2):
        found, naive = _evaluate(series, lead, share)
        cells.append(f"{found[0]:6.2f} {naive[0]:6.2f}  {found[1]:5.3f}  {found[2]:6.2f} {naive[2]:6.2f}")
    return "  |".join(cells)


def _evaluate(series: Floats, lead: int, share: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(ape, cover, pinball) of the forecast, and of persistence."""
    half, day, horizon = len(series) // 2, DAY_MIN // STEP_MIN, Horizon(lead, 1, peak=False)
    truths, ours, naive = [], [], []
    for start in range(half, len(series) - lead, day):
        known = series[: start + 1]
        rows = np.arange(start, min(start + day, len(series) - lead))
        rows = rows[~np.isnan(series[rows]) & ~np.isnan(series[rows + lead])]
        ours.append(fit(known, horizon, STEP_MIN).many(series, rows, (0.5, share)))
        changes = known[lead:] / known[:-lead] - 1.0
        usual = np.quantile(changes[np.isfinite(changes)], share)
        naive.append(np.column_stack((series[rows], series[rows] * (1.0 + usual))))
        truths.append(series[rows + lead])
    truth, mean = np.concatenate(truths), float(np.nanmean(series))

    def scores(found: list[Floats]) -> tuple[float, ...]:
        middle, high = np.concatenate(found).T
        over = truth - high
        return (
            100 * float(np.mean(np.abs(middle - truth) / truth)),
            float(np.mean(truth <= high)),
            100 * float(np.mean(np.maximum(share * over, (share - 1) * over))) / mean,
        )

    return scores(ours), scores(naive)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--share", type=float, default=0.9)
    args = parser.parse_args()
    each = "ape   naive  cover  pinball naive"
    print(f"{'trace':32}  | +10 min: {each} | +20 min: {each}")
    for path in args.traces:
        print(row(path.name, windows(path), args.share), flush=True)
    noise = np.random.RandomState(1).poisson(NOISE_MEAN, 7 * DAY_MIN // STEP_MIN).astype(float)
    print(row("white noise", noise, args.share))


if __name__ == "__main__":
    main()
