"""What holds for all tests."""

import gc
import os
import signal
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes depends more on the machine's other work than on the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("patient"), max_examples=25)  # ./test.sh
settings.load_profile("patient")

# Servers of tests are on loopback, and no proxy is on the way to them. Said so, the SDKs of Google and Azure need not look
# for one in the whole environment at each request, which took them a seventh of their time.
os.environ.setdefault("NO_PROXY", "127.0.0.1,localhost")

#: Memory with the room for the folders of a whole run.
_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 4 << 30


def has_room(folder: Path) -> bool:
    """Return whether programs can be run from a folder, and files of a whole run fit into it."""
    if not os.access(folder, os.W_OK):
        return False
    found = os.statvfs(folder)
    return not found.f_flag & os.ST_NOEXEC and found.f_bavail * found.f_frsize >= _ROOM_BYTES


# Databases of tests wait for the disk at each commit, and file systems when a file is replaced. No test cuts the power.
if "TMPDIR" not in os.environ and has_room(_MEMORY):
    os.environ["TMPDIR"] = tempfile.tempdir = str(_MEMORY)

# A shell lets what it starts in the background ignore Ctrl-C, and so would every program under test: what is ignored
# stays ignored in children, what is handled is not.
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Collection keeps what it allocates: thousands of tests and the SDKs of the clouds. Looking for garbage among them took a
# tenth of its time, and of that of each test that allocates much.
gc.disable()


#: Folders whose tests wait for processes and sockets more than they compute.
WAITING = ("browser", "e2e", "integration")
#: The part of a run in which all of their files begin: the last ones to end should be short.
WAITING_BEGIN = 0.9


def side_by_side(files: Iterable[Path]) -> dict[Path, float]:
    """Return the place of each file in a run of several workers, from 0 to 1: files that wait spread among those that compute. All of
    one kind first would leave cores idle, and then workers without one."""
    kinds: dict[bool, list[Path]] = {True: [], False: []}
    for file in dict.fromkeys(files):
        kinds[file.parent.name in WAITING].append(file)
    return {
        file: number / len(kind) * (WAITING_BEGIN if waits else 1.0)
        for waits, kind in kinds.items()
        for number, file in enumerate(kind)
    }


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        places = side_by_side(item.path for item in items)
        items.sort(key=lambda item: places[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()
