"""Work that can wait, on a thread of its own: old rows are removed, the database is copied, logs are cut.

None of it may delay a tick: rows go in small steps with pauses between them, and a copy blocks no writer.
"""

from __future__ import annotations

import logging
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.controller.reconcile.store_health import sentence_of
from skyserve_cli.controller.reconcile.team_ledger import month_start
from skyserve_cli.state.copies import NoRoomError, copy_of_day
from skyserve_cli.state.lease import LeaseLostError
from skyserve_cli.state.opening import sqlite_file
from skyserve_cli.state.store import Store

log = logging.getLogger(__name__)

ROUND_S = 10.0
PRUNE_EVERY_S = 3600.0
KEEP_ENDED_S = 7 * 86400.0
KEEP_EVENTS_S = 30 * 86400.0
#: Between two steps of a removal; the tick and the API write meanwhile.
PAUSE_S = 0.05

LARGEST_LOG_BYTES = 16 << 20
KEPT_LOGS = 2


class Housekeeper(threading.Thread):
    """`clock` dates rows and copies, `steady` measures how long ago the last removal was.

    `check` is called at each round, before anything is copied. `tidy` is called with the present instant after each removal. With `keeps_month` replicas that terminated in the current month stay, because what the month has cost is computed from them.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        steady: Clock,
        copies: Path,
        agents: Path,
        *,
        check: Callable[[], None] = lambda: None,
        tidy: Callable[[float], None] = lambda now: None,
        keeps_month: bool = False,
    ) -> None:
        super().__init__(name="housekeeper", daemon=True)
        self._store = store
        self._clock = clock
        self._steady = steady
        self._copies = copies
        self._agents = agents
        self._keeps_month = keeps_month
        self._check = check
        self._tidy = tidy
        self._stopping = threading.Event()
        self._pruned_at: float | None = None
        self._trouble = ""

    def run(self) -> None:
        while not self._stopping.wait(ROUND_S):
            self.round()

    def stop(self) -> None:
        self._stopping.set()
        if self.is_alive():
            self.join(timeout=10.0)

    def round(self) -> None:
        """Run due tasks. A failure is logged when its reason is another one than the last; the next round tries again."""
        trouble = [self._attempt(job) for job in (self._check, self._rotate, self._copy, self._prune)]
        sentence = "; ".join(filter(None, trouble))
        if sentence and sentence != self._trouble:
            log.warning("%s", sentence)
        self._trouble = sentence

    def _attempt(self, job: Callable[[], None]) -> str:
        try:
            job()
        except (_StoppingError, LeaseLostError):
            return ""
        except SQLAlchemyError as error:
            return f"old rows are not removed: {sentence_of(error)}"
        except NoRoomError as error:
            return str(error)
        except (OSError, sqlite3.Error) as error:
            return f"{job.__name__.strip('_')}: {error}"
        except Exception:
            log.exception("housekeeping")
        return ""

    def _rotate(self) -> None:
        for path in self._agents.glob("*/agent.log"):
            cut(path)

    def _copy(self) -> None:
        file = sqlite_file(self._store.database.url)
        if file is not None:
            made = copy_of_day(file, self._copies, self._clock.now())
            if made is not None:
                log.info("copied the database to %s", made)

    def _prune(self) -> None:
        now = self._steady.now()
        if self._pruned_at is not None and now - self._pruned_at < PRUNE_EVERY_S:
            return
        self._pruned_at = now
        at = self._clock.now()
        before = at - KEEP_ENDED_S
        before = min(before, month_start(at)) if self._keeps_month else before
        self._store.archive_replicas(before=before, pause=self._pause)
        self._store.prune_events(before=at - KEEP_EVENTS_S, pause=self._pause)
        self._store.fold_demand(int(at // 60), pause=self._pause)
        self._store.fold_series(at, pause=self._pause)
        self._store.fold_usage(at, pause=self._pause)
        self._tidy(at)

    def _pause(self) -> None:
        if self._stopping.wait(PAUSE_S):
            raise _StoppingError


class _StoppingError(Exception):
    """The controller stops in the middle of a removal, which is no loss: the rest is removed by the next one."""


def cut(path: Path, largest: int = LARGEST_LOG_BYTES, kept: int = KEPT_LOGS) -> bool:
    """If a log is larger than that, move its content to `path`.1, and that of `path`.1 to `path`.2. Returns whether.

    The process that writes the log keeps its descriptor, which appends, so it continues at the beginning of the emptied file.
    A line that it writes between the copy and the cut is lost.
    """
    if path.stat().st_size <= largest:
        return False
    for number in range(kept - 1, 0, -1):
        with suppress(FileNotFoundError):
            _numbered(path, number).replace(_numbered(path, number + 1))
    shutil.copyfile(path, _numbered(path, 1))
    _numbered(path, 1).chmod(0o600)
    with path.open("r+b") as file:
        file.truncate(0)
    return True


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
