"""CPU of one choice of a target, by policy and number of targets.

    python -m benchmarks.choice_cpu [--policies gorgo,cache_aware] [--targets 8,100,1000]

Conversations of 2 to 20 KB share a system prompt and grow by a KB each turn; eight requests per target are under way. A
target reports running and pending requests, as an engine does. `choose` is the choice alone, `request` all that a
policy is called for in the life of a request: chosen, recorded, first byte, end. Best of the rounds.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from random import Random

from benchmarks.routing_published import make_policy
from policies.routing.base import RequestView, RoutingPolicy, TargetView
from policies.routing.target_list import TargetList

ROUNDS = 5
REQUESTS = 2000
IN_FLIGHT = 8
SYSTEM = Random(0).randbytes(1500)


class Conversations:
    """Requests of clients that take turns."""

    def __init__(self, clients: int) -> None:
        self._rng = Random(1)
        self._prompts = [
            SYSTEM + self._rng.randbytes(self._rng.randrange(500, 18_000)) for _ in range(clients)
        ]
        self._serial = 0

    def next(self) -> RequestView:
        self._serial += 1
        index = self._rng.randrange(len(self._prompts))
        prompt = self._prompts[index]
        self._prompts[index] = (prompt if len(prompt) < 20_000 else SYSTEM) + self._rng.randbytes(1000)
        return RequestView(
            str(self._serial), "POST", "/v1/chat/completions", len(prompt), prompt, scope="model"
        )


def run(policy: RoutingPolicy, views: list[TargetView]) -> tuple[float, float]:
    """Seconds per choice and per request, after a warm-up."""
    by_id = {view.id: view for view in views}
    targets = TargetList(enumerate(views), views)  # as in an agent
    under_way: deque[tuple[RequestView, str]] = deque()
    source = Conversations(20 * len(views))
    now, best_choose_s, best_request_s = 0.0, 1.0, 1.0
    for _ in range(1 + ROUNDS):
        requests = [source.next() for _ in range(REQUESTS)]
        choosing_s = 0.0
        began = time.process_time()
        for request in requests:
            now += 0.01
            before = time.thread_time()
            choice = policy.choose(request, targets, now)
            choosing_s += time.thread_time() - before
            assert choice is not None
            policy.record(request, choice.target_id, now)
            view = by_id[choice.target_id]
            view.in_flight += 1
            view.waiting += 1
            view.running, view.pending = view.in_flight - view.waiting, view.waiting
            under_way.append((request, choice.target_id))
            if len(under_way) > IN_FLIGHT * len(views):
                _end(policy, by_id, *under_way.popleft(), now)
            if len(under_way) > len(views):
                _answer(policy, by_id, *under_way[-len(views)], now)
        request_s = (time.process_time() - began) / REQUESTS
        best_choose_s = min(best_choose_s, choosing_s / REQUESTS)
        best_request_s = min(best_request_s, request_s)
    return best_choose_s, best_request_s


def _answer(
    policy: RoutingPolicy, by_id: dict[str, TargetView], request: RequestView, target_id: str, now: float
) -> None:
    policy.responded(request, target_id, now)
    view = by_id[target_id]
    view.waiting -= 1
    view.running, view.pending = view.in_flight - view.waiting, view.waiting


def _end(
    policy: RoutingPolicy, by_id: dict[str, TargetView], request: RequestView, target_id: str, now: float
) -> None:
    policy.ended(request, target_id, now, 100)
    view = by_id[target_id]
    view.in_flight -= 1
    view.running = view.in_flight - view.waiting


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policies", type=lambda text: text.split(","), default=["gorgo", "cache_aware"])
    parser.add_argument(
        "--targets", type=lambda text: [int(part) for part in text.split(",")], default=[8, 100, 1000]
    )
    args = parser.parse_args()
    print(f"{'targets':>7}  {'policy':<12} {'us/choose':>10} {'choices/s':>10} {'us/request':>11}")
    for count in args.targets:
        for name in args.policies:
            choose_s, request_s = run(make_policy(name), [TargetView(f"t{n}") for n in range(count)])
            print(
                f"{count:>7}  {name:<12} {choose_s * 1e6:>10.1f} {1 / choose_s:>10.0f} {request_s * 1e6:>11.1f}"
            )


if __name__ == "__main__":
    main()
