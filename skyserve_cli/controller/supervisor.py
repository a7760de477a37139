"""Keeps the daemon alive: a small process that starts it and restarts it when it exits.

Who has a service manager runs `serve controller start --foreground` under it instead. The supervisor knows nothing
of services, so there is little in it that could fail; should it be killed itself, the daemon keeps running unsupervised.

    python -m skyserve_cli.controller.supervisor
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from threading import Event
from types import FrameType

from policies.backoff import delay_s
from skyserve_cli.controller.reconcile.clock import SteadyClock
from skyserve_cli.home import Home, make_private

#: Exit codes after which a restart would not help: stopped on request, wrong configuration, another controller is running,
#: a database that this program cannot use.
FINAL = (0, 2, 3, 4)
SHORTEST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
#: A daemon that lived this long did not die of how it was started.
LONG_LIFE_S = 60.0


def keep(command: list[str], stopping: Event, stop_with: list[subprocess.Popen[bytes]]) -> int:
    """Run `command` until it ends for good; the exit code of its last run. `stop_with` holds the running process.

    A command that fails by itself on its very first run would fail again: its exit code is returned. One that
    is killed, or fails later, is started again after a pause that doubles from death to death.
    """
    clock = SteadyClock()
    deaths = 0
    while True:
        born = clock.now()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        stop_with[:] = [process]
        code = process.wait()
        if stopping.is_set() or code in FINAL or (code > 0 and deaths == 0):
            return max(0, code)
        deaths = 1 if clock.now() - born > LONG_LIFE_S else deaths + 1
        print(f"the controller ended with {code}; starting it again", file=sys.stderr, flush=True)
        if stopping.wait(delay_s(deaths, SHORTEST_PAUSE_S, LONGEST_PAUSE_S)):
            return 0


def main() -> int:
    make_private(os.environ)
    home = Home.from_environment(os.environ)
    home.create()
    # Shared: two that start at once are no harm, the daemon's own lock lets only one of theirs live. Held so
    # that `serve controller stop` can wait for our end, too.
    lock = os.open(home.supervisor_lock, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)
    stopping = Event()
    running: list[subprocess.Popen[bytes]] = []

    def stop(_sign: int, _frame: FrameType | None) -> None:
        stopping.set()
        for process in running:
            process.terminate()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    return keep([sys.executable, "-m", "skyserve_cli.controller.daemon"], stopping, running)


if __name__ == "__main__":
    sys.exit(main())
