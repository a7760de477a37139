"""A controller whose probes reach no replica while the file DEAF is in its home: only its own network is cut. If the file names endpoints,
only those are not reached.

SKYSERVE_HOME=... python -m benchmarks.chaos.deaf_controller
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from skyserve_cli.controller import daemon
from skyserve_cli.controller import readiness as probes
from skyserve_cli.controller.reconcile.ports import ProbeOrder

DEAF = "deaf"
_NOWHERE = "http://127.0.0.1:1"  # a port that refuses every connection


def main() -> int:
    """The daemon, with endpoints that its prober cannot reach while the file is there. All else is the product's own."""
    file = Path(os.environ["SKYSERVE_HOME"]) / DEAF
    probe = probes.ReplicaLine.probe

    async def probe_or_not(self: probes.ReplicaLine, order: ProbeOrder) -> object:
        named = file.read_text().split() if file.exists() else None
        is_deaf = named is not None and (not named or order.endpoint in named)
        return await probe(self, order._replace(endpoint=_NOWHERE) if is_deaf else order)

    probes.ReplicaLine.probe = probe_or_not  # type: ignore[assignment,method-assign]
    return daemon.main()


if __name__ == "__main__":
    sys.exit(main())
