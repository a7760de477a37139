"""A service lives through hours of a spot market in minutes, with requests all the while.

The local cloud plays a trace at a multiple of its speed: zones fill up and empty, spot replicas die without notice, at
times every zone is empty. The placer keeps the wanted number with on-demand replicas and goes back to spot. With
`--kill-every` the controller is killed (SIGKILL) again and again meanwhile; its supervisor starts it again.

Not everything is compressed: an engine starts in about two seconds and the placers' back-offs (10 s to 5 min, with
RiskHedge 10 min and more) are what they are, so the market here is harsher to the placers than the same one at its own
speed. To RiskHedge it is one in which zones are lost every minute: it buys on demand, and asks for spot again when the
outages have lasted as long again.

Claims:
* no request fails
* when the market is calm again the service goes back to spot replicas alone (RiskHedge: to as many as are wanted)
* at most one instance for each replica that was launched, alive where the replica is, and no id used twice

    python -m benchmarks.chaos.spot_market [--minutes 5] [--kill-every 20] [--placer risk_hedge] [--out report.html]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from benchmarks import synthetic
from benchmarks.chaos.harness import Stack, Stuck, share, until
from benchmarks.chaos.kill_controller import audit_instances
from benchmarks.chaos.service_files import service_yaml
from benchmarks.chaos.traffic import Outcome, Traffic, latency, tally
from provisioners.local import controls as local_controls
from skyserve_cli.sim import trace

NAME = "hedged"
REPLICAS, EXTRA = 2, 1
SPOT_USD_HOUR, ON_DEMAND_USD_HOUR = 0.30, 1.00
# The longest back-off of a zone by then, and a start.
CALM_PATIENCE_S = {"dynamic_fallback": 400.0, "risk_hedge": 1500.0}
SLOW_S = 1.0


def spec(placer: str = "dynamic_fallback") -> str:
    """Two replicas on spot, with on-demand ones where there is no spot."""
    plain = service_yaml(NAME, REPLICAS, time_to_first_byte_s=60.0, drain_timeout_s=10.0)
    knobs = f"min_replicas: {REPLICAS}, spot_placer: {placer}"
    if placer == "dynamic_fallback":
        knobs += f", num_overprovision: {EXTRA}, dynamic_ondemand_fallback: true"
    return plain.replace(f"replicas: {REPLICAS}\n", f"replica_policy: {{{knobs}}}\n")


def furnish(stack: Stack, regions: Mapping[str, list[str]]) -> None:
    """Give the local cloud these zones; each next one is a little dearer."""
    lines, number = ["cold_start_s: 0.5", "stop_grace_s: 3", "regions:"], 0
    for region, zones in regions.items():
        lines.append(f"  {region}:")
        for zone in zones:
            prices = f"spot_usd_hour: {SPOT_USD_HOUR * (1 + 0.1 * number):.3f}, on_demand_usd_hour: {ON_DEMAND_USD_HOUR}"
            lines.append(f"    {zone}: {{{prices}}}")
            number += 1
    stack.store.config_path.write_text("\n".join(lines) + "\n")


def play(stack: Stack, source: Path, speed: float = 1.0) -> None:
    """Let the market follow a timeline or a trace from now on."""
    local_controls.play_market(stack.home.root, source, speed)


class Fleet(NamedTuple):
    """Ready spot replicas, ready on-demand replicas, and those that are anything else."""

    spot: int
    on_demand: int
    others: int

    def calm(self, placer: str) -> bool:
        """What a calm market leads to: spot alone, as many as `spec` says; RiskHedge knows itself how many."""
        if placer == "risk_hedge":
            return self.spot >= REPLICAS and self.others == 0
        return self == (REPLICAS + EXTRA, 0, 0)


def fleet(stack: Stack) -> Fleet:
    replicas = stack.replicas(NAME)
    ready = [r["capacity_type"] for r in replicas if r["state"] == "READY"]
    spot = ready.count("spot")
    return Fleet(spot, len(ready) - spot, len(replicas) - len(ready))


def serve(stack: Stack, *arguments: str) -> str:
    """What the command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "skyserve_cli", *arguments],
        env={**os.environ, "SKYSERVE_HOME": str(stack.home.root), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


def audit(stack: Stack) -> list[str]:
    """Whatever a controller that was killed might have done twice or forgotten, as sentences."""
    broken = audit_instances(stack)
    twice = stack.rows(
        "SELECT service, replica_id FROM events WHERE kind = 'Launch' GROUP BY 1, 2 HAVING count(*) > 1"
    )
    if twice:
        broken.append(f"launched twice: {twice}")
    errors = stack.rows("SELECT service, replica_id, message FROM events WHERE kind = 'error'")
    if errors:
        broken.append(f"errors in the event log: {errors}")
    return broken


class Killer:
    """Kills the controller every `every_s` seconds, for its supervisor to start again. A context manager with a thread
    of its own; None kills nothing."""

    def __init__(self, stack: Stack, every_s: float | None) -> None:
        self.done = 0
        self._stack = stack
        self._every_s = every_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="killer", daemon=True)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(60.0)

    def _run(self) -> None:
        while self._every_s is not None and not self._stopping.wait(self._every_s):
            self.done += kill_controller(self._stack)


def kill_controller(stack: Stack) -> int:
    """SIGKILL; how many there were to kill."""
    killed = 0
    for pid in stack.controllers():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed


def cut(source: str, start_h: float, hours: float, folder: Path) -> trace.Trace:
    """A part of a trace, written as one to play."""
    part = trace.load(trace.find(source)).window(start_h * 3600, hours * 3600)
    synthetic.write(part, folder)
    return part


def seen(outcomes: list[Outcome]) -> str:
    """What clients say of the service."""
    good = [outcome for outcome in outcomes if outcome.good]
    at_once = [outcome for outcome in good if outcome.took_s <= SLOW_S]
    return f"answered {share(good, outcomes)}, within {SLOW_S:g} s {share(at_once, outcomes)}; {latency(outcomes)}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Hours of a spot market in minutes, with requests.")
    parser.add_argument("--trace", default="synthetic-volatile", help="a shipped one, or a folder")
    parser.add_argument("--start", type=float, default=12.5, help="hours into the trace")
    parser.add_argument("--speed", type=float, default=72.0, help="times as fast")
    parser.add_argument("--minutes", type=float, default=5.0, help="of ours")
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second")
    parser.add_argument("--placer", choices=tuple(CALM_PATIENCE_S), default="dynamic_fallback")
    parser.add_argument("--kill-every", type=float, help="seconds between kills of the controller")
    parser.add_argument("--out", type=Path, help="the report: .html or .png")
    given = parser.parse_args()
    with Stack() as stack:
        hours = given.minutes * given.speed / 60
        part = cut(given.trace, given.start, hours, stack.home.root / "trace")
        regions: dict[str, list[str]] = {}
        for zone in part.zones:
            regions.setdefault(zone.region, []).append(zone.name)
        furnish(stack, regions)
        stack.up(spec(given.placer))
        until(lambda: fleet(stack).calm(given.placer), "the service does not come up")
        play(stack, stack.home.root / "trace", given.speed)
        print(f"{part.name}: {hours:g} h of it in {given.minutes:g} min, {REPLICAS} replicas, {given.placer}")
        with Traffic(stack.endpoint(NAME), given.rate) as traffic, Killer(stack, given.kill_every) as killer:
            time.sleep(given.minutes * 60)
        drawn = () if given.out is None else ("--out", str(given.out.absolute()))
        print(serve(stack, "report", NAME, *drawn))
        local_controls.calm(stack.home.root)
        broken = calm_again(stack, given.placer) + audit(stack)
    print(f"controller killed {killer.done} times; clients: {seen(traffic.outcomes)}")
    if traffic.failed():
        broken.append(f"requests failed: {tally(traffic.outcomes)}")
    for claim in broken:
        print(f"BROKEN: {claim}", file=sys.stderr)
    return 1 if broken else 0


def calm_again(stack: Stack, placer: str) -> list[str]:
    """Wait for the fleet of a calm market; Returns the problem, if it does not come."""
    began_at = time.monotonic()
    try:
        until(lambda: fleet(stack).calm(placer), "", CALM_PATIENCE_S[placer])
    except Stuck:
        return [f"the market is calm, and the fleet is {fleet(stack)}"]
    print(f"back on spot {time.monotonic() - began_at:.0f} s after the market was calm: {fleet(stack)}")
    return []


if __name__ == "__main__":
    sys.exit(main())
