"""`python -m benchmarks.serving_agent`: our agent (`python -m lb`), which reports that each target served a client in the last
`SERVED_WITHIN_S` seconds, as it would under a load of some requests per second and target.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace

from lb.__main__ import main
from lb.config.schema import TargetStats
from lb.core.targets import TargetTable

SERVED_WITHIN_S = 2.0
_stats = TargetTable.stats


def _serving(self: TargetTable, now: float, window_s: float) -> tuple[TargetStats, ...]:
    return tuple(
        replace(one, served_s=random.uniform(0.0, SERVED_WITHIN_S), requests=60)
        for one in _stats(self, now, window_s)
    )


TargetTable.stats = _serving  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main())
