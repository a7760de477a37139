"""How `setup` or `run` ended, in a sentence."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

FOREGROUND = "it must run for as long as the replica is to serve"
_KILLED = (137, -int(signal.SIGKILL))  # the shell says 128 more than the number of the signal
_MOST_NAMES = 3


def exit_sentence(what: str, code: int, last: str, left: Sequence[str] = (), *, oom: bool = False) -> str:
    """Return how a script ended; `what` as in "`run` ended".

    `last` is the last line that it printed, `left` are the names of the programs that go on without it. `oom`: the machine ran out of
    memory meanwhile.
    """
    how = f"with exit code {code}" if code >= 0 else f"by signal {signal.Signals(-code).name}"
    if oom and code in _KILLED:
        how += " (out of memory?)"
    if what != "`run` ended" or code != 0:
        return f"{what} {how}" + (f": {last}" if last else "")
    why = FOREGROUND
    if left:
        names = ", ".join(f"`{name}`" for name in list(dict.fromkeys(left))[:_MOST_NAMES])
        why = (
            f"{names} runs on in the background, but `run` must stay in the foreground: start the server with `exec`, or end "
            "`run` with `wait`"
        )
    return f"{what} {how}: {why}" + (f"; it printed last: {last}" if last else "")


def oom_kills() -> int:
    """Return how many processes this machine has killed since it started because it had no memory left."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
