"""The dead-man switch of a machine in virtual time: the very script of the user data, with `sleep` as a shell function that
lets a period pass and then does what a scenario has for it."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from provisioners.remote.ssh_keys import LEASE_FOLDER

PERIOD_S = 60
HOUR, DAY = 60, 24 * 60  # in periods

_WORLD = """\
i=0
sleep() {{
  [ "$1" = {period_s} ] || exit 8
  i=$((i+1)); [ $i -le {periods} ] || exit 9
{scenario}
}}
mv() {{ read -r line <count.new; echo "$line" >count; }}
timeout() {{ shift; "$@"; }}
python3() {{ echo $i >>deletions; {deletion}; }}
shutdown() {{ echo $i >ended; exit 0; }}
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """In periods since boot: when the machine shut down, if it did, and when it asked to be deleted. `count` is the last line
    for the agent."""

    ended_at: int | None
    deletions: tuple[int, ...]
    count: tuple[int, ...]


def switch_of(user_data: str) -> str:
    found = re.search(r"cat >\$d/deadman <<'E'\n(.*?)\nE\n", user_data, re.DOTALL)
    assert found is not None, "the user data has no dead-man switch"
    return found[1]


def live(user_data: str, folder: Path, scenario: str, periods: int, deletion: str = "false") -> Outcome:
    """Let the periods pass, or fewer if the machine ends. `scenario` is shell, run in the lease's folder after each period `$i`;
    `deletion` is what the program of the cloud comes to."""
    world = _WORLD.format(period_s=PERIOD_S, periods=periods, scenario=scenario, deletion=deletion)
    script = world + switch_of(user_data).replace(LEASE_FOLDER, str(folder))
    ran = subprocess.run(
        ["sh", "-c", script], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode in (0, 9), (ran.returncode, ran.stderr)
    assert ran.stderr == ""
    ended, deletions = folder / "ended", folder / "deletions"
    return Outcome(
        int(ended.read_text()) if ended.exists() else None,
        tuple(map(int, deletions.read_text().split())) if deletions.exists() else (),
        tuple(map(int, (folder / "count").read_text().split())),
    )
