"""The cells of the fault matrix (`benchmarks.chaos.matrix`): what is done to a `Patient`, and what its commands must say then."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import sqlalchemy as sa

from benchmarks.chaos.databases import MOST_CONNECTIONS, PostgresServer
from benchmarks.chaos.deaf_controller import DEAF
from benchmarks.chaos.harness import until
from benchmarks.chaos.patient import NAME, REPLICAS, Cluster, Examination, Patient
from skyserve_cli.controller.api.client import AWAY, RefusedError
from skyserve_cli.state.copies import copies, copy_to
from skyserve_cli.state.revisions import NEWEST, upgrade
from tests.clouds.kubernetes.kube_places import living

SMALL_FILE_SYSTEM = 96 << 20
FAULT_S = 12.0
HOUR_S, DAY_S = 3600.0, 86400.0
SERVICES = 200
EVENTS_PER_S, EVENTS_FOR_S = 5000, 20
UPDATES = 1000
ROOT = Path(__file__).parents[2]
_STATE_FILES = ("state.db", "state.db-wal", "state.db-shm")


@dataclass(frozen=True, slots=True)
class Cell:
    """`fault` is what befalls the patient. `controller`: a module to be run in place of the product's daemon."""

    name: str
    fault: Callable[[Patient], None]
    database: str = "sqlite"
    is_short: bool = False
    is_small: bool = False  # its home is on a small file system of its own
    controller: str = ""
    has_cluster: bool = False  # beside the local cloud

    @property
    def is_root(self) -> bool:
        return self.is_small or self.database == "postgresql"

    def run(self) -> Examination:
        with (
            _server(self.database) as postgres,
            _file_system(self.is_small) as root,
            _cluster(self.has_cluster) as cluster,
        ):
            patient = Patient(postgres, root, self.controller, cluster)
            with patient.in_service():
                self.fault(patient)
            return patient.found


@contextmanager
def _server(kind: str) -> Iterator[PostgresServer | None]:
    if kind != "postgresql":
        yield None
        return
    with closing(PostgresServer(("a",))) as server:
        yield server


@contextmanager
def _file_system(is_small: bool) -> Iterator[Path | None]:
    if not is_small:
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="skyserve-small-"))
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SMALL_FILE_SYSTEM}", "none", str(folder)], check=True
    )
    try:
        yield folder / "home"
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


@contextmanager
def _cluster(is_there: bool) -> Iterator[Cluster | None]:
    if not is_there:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="skyserve-cluster-") as folder, living(Path(folder)) as made:
        yield made


# --- the database ----------------------------------------------------------------------------------------------


def _of(patient: Patient) -> PostgresServer:
    assert patient.postgres is not None
    return patient.postgres


def slow_database(patient: Patient) -> None:
    relay = _of(patient).relays["a"]
    patient.lose(1)
    relay.delay_s = 2.0
    time.sleep(FAULT_S)
    said = patient.says("database|state|waiting", "--timeout", "15", "status", NAME)
    patient.found.claim(
        "first line",
        said.first_s is not None and said.first_s < 4.0,
        f"its first line came after {said.first_s} s",
    )
    relay.delay_s = 0.0


def hung_database(patient: Patient) -> None:
    relay = _of(patient).relays["a"]
    patient.lose(1)
    relay.cut()
    patient.says("cannot read or write its state|database|leads")
    relay.heal()


def stopped_database(patient: Patient) -> None:
    patient.lose(1)
    _of(patient).stop()
    patient.says("cannot read or write its state|database|leads")
    time.sleep(FAULT_S)
    _of(patient).start()


def failed_over_database(patient: Patient) -> None:
    patient.lose(1)
    for _ in range(3):
        _of(patient).restart()
        time.sleep(2.0)


def full_of_connections(patient: Patient) -> None:
    engine = sa.create_engine(_of(patient).own_url, poolclass=sa.pool.NullPool)
    taken = list[sa.Connection]()
    patient.lose(1)
    with suppress(sa.exc.OperationalError):
        while len(taken) < MOST_CONNECTIONS:
            taken.append(engine.connect())
    time.sleep(FAULT_S)
    patient.says("SERVICE|cannot read or write its state|connection|leads")
    for each in taken:
        each.close()


def serialization_errors(patient: Patient) -> None:
    server = _of(patient)
    server.execute("ALTER DATABASE postgres SET default_transaction_isolation = 'serializable'")
    server.restart()
    patient.lose(1)
    rival = sa.create_engine(server.own_url, isolation_level="SERIALIZABLE")
    ends_at = time.monotonic() + FAULT_S
    while time.monotonic() < ends_at:
        with suppress(sa.exc.OperationalError, sa.exc.DBAPIError), rival.begin() as c:
            c.exec_driver_sql("SELECT count(*) FROM replicas")
            c.exec_driver_sql("UPDATE changes SET count = count")
    rival.dispose()
    server.execute("ALTER DATABASE postgres RESET default_transaction_isolation")


def read_only_database(patient: Patient) -> None:
    server = _of(patient)
    server.execute("ALTER DATABASE postgres SET default_transaction_read_only = on")
    patient.lose(1)
    server.restart()
    patient.says("read.only")
    time.sleep(FAULT_S)
    server.execute("BEGIN READ WRITE; ALTER DATABASE postgres RESET default_transaction_read_only; COMMIT")
    server.restart()


def deleted_database(patient: Patient) -> None:
    for name in _STATE_FILES:
        (patient.home.root / name).unlink(missing_ok=True)
    patient.follow(patient.says("was deleted while the controller ran").first_line)


def older_database(patient: Patient) -> None:
    file = patient.home.root / "state.db"
    copy = file.with_name("older.db")
    copy_to(file, copy)
    patient.lose(1)
    patient.settled(NAME)
    copy.replace(file)
    patient.follow(patient.says("was replaced while the controller ran").first_line)


def older_database_at_start(patient: Patient) -> None:
    file = patient.home.root / "state.db"
    copy = file.with_name("older.db")
    copy_to(file, copy)
    patient.lose(1)
    patient.settled(NAME)
    patient.serve("controller", "stop")
    for name in _STATE_FILES:
        (patient.home.root / name).unlink(missing_ok=True)
    copy.replace(file)
    patient.follow(
        patient.says("older than the one that this home had", "controller", "start").first_line,
        ("controller adopt", "controller start"),
    )


def corrupt_page(patient: Patient) -> None:
    file = patient.home.root / "state.db"
    until(lambda: copies(patient.home.backups), "no copy of the day is made", 40.0)
    patient.serve("controller", "stop")
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with file.open("r+b") as pages:
        for page in range(2, file.stat().st_size // 4096):
            pages.seek(page * 4096 + 100)
            pages.write(random.Random(page).randbytes(2000))
    patient.follow(patient.says("is damaged", "controller", "start").first_line)
    patient.serve("controller", "start")


def full_disk(patient: Patient) -> None:
    junk = patient.home.root / "junk"
    ends_at = time.monotonic() + FAULT_S
    patient.lose(1)
    while time.monotonic() < ends_at:
        with suppress(OSError), junk.open("ab", buffering=0) as out:
            while True:
                out.write(b"x" * 4096)
        time.sleep(0.2)
    patient.says("full")
    junk.unlink()


# --- clocks ----------------------------------------------------------------------------------------------------


def _set_clock(patient: Patient, by_s: float) -> None:
    patient.clock.write_text(str(by_s))
    patient.says("SERVICE")
    patient.lose(1)
    patient.settled(NAME)
    patient.wait_for(
        lambda: "clock jumped" in patient.serve("events").out,
        "no event names the clock",
    )


def clock_back(patient: Patient) -> None:
    _set_clock(patient, -HOUR_S)


def clock_forward(patient: Patient) -> None:
    _set_clock(patient, DAY_S)


def suspended(patient: Patient) -> None:
    pid = patient.controller_pid()
    patient.freeze(pid)
    time.sleep(FAULT_S)
    patient.thaw(pid)
    patient.says("SERVICE")


# --- the network -----------------------------------------------------------------------------------------------


def _deaf(patient: Patient, endpoints: str) -> None:
    """The controller's probes do not reach replicas that serve."""
    file = patient.home.root / DEAF
    file.write_text(endpoints)
    time.sleep(30.0)
    patient.says("SERVICE")
    file.unlink()


def no_replica_reached(patient: Patient) -> None:
    _deaf(patient, "")


def one_zone_not_reached(patient: Patient) -> None:
    _deaf(patient, str(patient.replica(NAME, 1)["endpoint"]))


_AWAY = "\npods: kubernetes cannot be listed: the cluster test does not respond"


def one_cloud_not_reached(patient: Patient) -> None:
    """A service of the cloud that is reached has its losses replaced; one of the other keeps all its replicas."""
    assert patient.cluster is not None
    world, _ = patient.cluster
    patient.up(
        "name: pods\nservice: {readiness_probe: /health, replicas: 2}\nresources: {infra: kubernetes}\n"
        f"envs: {{PYTHONPATH: {ROOT}}}\nrun: {_ENGINE} --host $SKYPILOT_NODE_IPS\n"
    )
    patient.settled("pods")
    before = patient.replicas("pods")
    world.troubles.is_mute = True
    patient.lose(1)
    patient.wait_for(
        lambda: _AWAY in patient.serve("status", "pods").out, "the first note of the service is not that"
    )
    patient.settled(NAME)
    patient.found.claim(
        "none ended", [one["id"] for one in patient.replicas("pods")] == [1, 2], "Pods were given up"
    )
    with urlopen(f"{patient.endpoint('pods')}/v1/models", timeout=10) as response:
        patient.found.claim(
            "answers", response.status == 200, "a service of the other cloud does not respond"
        )
    world.troubles.is_mute = False
    patient.wait_for(lambda: _AWAY not in patient.serve("status", "pods").out, "it is still said to be away")
    patient.found.claim("none ended", patient.replicas("pods") == before, "Pods are not those of before")
    patient.serve("down", "pods", "-y")
    patient.found.claim("no orphan", not world.pod_names(), f"Pods are left: {world.pod_names()}")


def cut_from_database_with_calls(patient: Patient) -> None:
    relay = _of(patient).relays["a"]
    patient.lose(1)
    until(
        lambda: any(one["state"] == "PROVISIONING" for one in patient.replicas(NAME)) or None,
        "nothing is launched",
        20.0,
    )
    relay.cut()
    patient.says("cannot read or write its state|database|leads")
    relay.heal()


# --- processes -------------------------------------------------------------------------------------------------


def killed_in_a_migration(patient: Patient) -> None:
    """The tables are those of an earlier release, and the program is killed while it brings them to its own."""
    patient.serve("controller", "stop")
    file = patient.home.root / "state.db"
    kept = file.with_name("kept.db")
    for name in _STATE_FILES[1:]:
        (patient.home.root / name).unlink(missing_ok=True)
    file.rename(kept)
    rng = random.Random(1)
    for _ in range(8):
        file.unlink(missing_ok=True)
        engine = sa.create_engine(f"sqlite:///{file}")
        with engine.begin() as connection:
            upgrade(connection, "0007")
        engine.dispose()
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from skyserve_cli.state.database import Database; Database('sqlite:///{file}')",
            ]
        )
        time.sleep(rng.uniform(0.1, 2.0))
        process.kill()
        process.wait()
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                f"from skyserve_cli.state.database import Database; Database('sqlite:///{file}').close()",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        patient.found.claim("recovers", done.returncode == 0, done.stderr[-200:])
    for name in _STATE_FILES:
        (patient.home.root / name).unlink(missing_ok=True)
    kept.rename(file)
    patient.serve("controller", "start")


def older_program(patient: Patient) -> None:
    patient.serve("controller", "stop")

    def stamp(revision: str) -> None:
        with closing(sqlite3.connect(patient.home.root / "state.db")) as connection:
            connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))
            connection.commit()

    stamp("0999")
    said = patient.says("newer release", "controller", "start")
    patient.found.claim("first line", said.code == 4, f"exit code {said.code}, not 4")
    stamp(NEWEST)
    patient.serve("controller", "start")


def killed(patient: Patient) -> None:
    rng = random.Random(2)
    patient.lose(1)
    for _ in range(5):
        time.sleep(rng.uniform(0.1, 2.0))
        with suppress(ProcessLookupError, FileNotFoundError):
            os.kill(patient.controller_pid(), signal.SIGKILL)
    patient.says("SERVICE")


def two_shells(patient: Patient) -> None:
    file = patient.home.root / "other.yaml"
    file.write_text(
        patient.file().replace(f"name: {NAME}", "name: other").replace(f"replicas: {REPLICAS}", "replicas: 1")
    )
    shells = [patient.begin("up", file, "-y") for _ in range(3)]
    codes = [shell.wait(90.0) for shell in shells]
    patient.found.claim("recovers", codes.count(0) >= 1, f"exit codes {codes}")
    made = patient.made()
    patient.found.claim(
        "not twice",
        made[("other", 1)] == 1 and made[("other", 2)] == 0,
        f"machines of the other service: {made}",
    )
    for shell in shells:
        for pipe in (shell.stdout, shell.stderr):
            if pipe is not None:
                pipe.close()
    patient.serve("down", "other", "-y")


def interrupted(patient: Patient) -> None:
    """Ctrl-C at every step of `up`, `update` and `down` of another service."""
    file = patient.home.root / "other.yaml"
    text = (
        patient.file().replace(f"name: {NAME}", "name: other").replace(f"replicas: {REPLICAS}", "replicas: 1")
    )
    for step_s in (0.3, 0.8, 1.5, 2.5):
        for verb in (("up", file, "-y"), ("update", "other", file, "-y"), ("down", "other", "-y")):
            file.write_text(text.replace("--model v1", f"--model at-{step_s}-{verb[0]}"))
            shell = patient.begin(*verb)
            time.sleep(step_s)
            shell.send_signal(signal.SIGINT)
            code = shell.wait(60.0)
            said = shell.stderr.read() if shell.stderr is not None else ""
            patient.found.claim(
                "first line", "Traceback" not in said, f"Ctrl-C in {verb[0]} after {step_s} s: {said[-200:]}"
            )
            patient.found.claim(
                "recovers", code in (0, 1, 130), f"Ctrl-C in {verb[0]} after {step_s} s: exit code {code}"
            )
            for pipe in (shell.stdout, shell.stderr):
                if pipe is not None:
                    pipe.close()
        patient.serve("down", "other", "-y")
    patient.wait_for(lambda: patient.view("other") is None, "the other service does not go down")


# --- load ------------------------------------------------------------------------------------------------------


def many_services(patient: Patient) -> None:
    idle = patient.file().replace(
        f"replicas: {REPLICAS}",
        "replica_policy: {min_replicas: 0, max_replicas: 1, target_qps_per_replica: 1}",
    )
    for number in range(SERVICES):
        patient.up(idle.replace(f"name: {NAME}", f"name: idle-{number}"))
    patient.lose(1)
    patient.says("SERVICE")
    patient.settled(NAME)
    for number in range(SERVICES):
        patient.client.down(f"idle-{number}", purge=True)
    patient.wait_for(lambda: len(patient.client.services()) == 1, "the idle services do not go down", 300.0)


def many_events(patient: Patient) -> None:
    patient.lose(1)
    began, put = time.monotonic(), 0
    with closing(sqlite3.connect(patient.home.root / "state.db", timeout=10.0)) as connection:
        columns = ", ".join(
            row[1] for row in connection.execute("PRAGMA table_info(events)") if row[1] != "seq"
        )
        last = f"SELECT {columns} FROM events ORDER BY seq DESC LIMIT 1"  # noqa: S608 - names of our own table
        row = connection.execute(last).fetchone()
        insert = f"INSERT INTO events ({columns}) VALUES ({', '.join('?' * len(row))})"  # noqa: S608 - as above
        while (passed_s := time.monotonic() - began) < EVENTS_FOR_S:
            due = int(passed_s * EVENTS_PER_S) - put
            connection.executemany(insert, [row] * due)
            connection.commit()
            put += due
            time.sleep(0.1)
    patient.found.remarks.append(f"{put / EVENTS_FOR_S:.0f} events/s")
    patient.says("SERVICE")
    said = patient.serve("events", NAME)
    patient.found.claim("first line", said.code == 0, f"`serve events`: {said.err[-200:]}")


def large_file(patient: Patient) -> None:
    file = patient.home.root / "large.yaml"
    file.write_text(
        patient.file() + "envs:\n" + "".join(f"  KEY_{number}: {'x' * 1000}\n" for number in range(10_000))
    )
    said = patient.serve("update", NAME, file, "-y")
    patient.found.claim(
        "first line", said.code == 2 and "large.yaml" in said.err, f"exit code {said.code}: {said.err[:200]}"
    )
    patient.found.claim(
        "first line", len(said.err.strip().splitlines()) <= 3, "more than a sentence is printed"
    )


def many_updates(patient: Patient) -> None:
    """The program stays the same, so no replica has a reason to end."""
    for number in range(UPDATES):
        with suppress(*AWAY, RefusedError):
            patient.update(patient.file(drain_timeout_s=60.0 + number % 2))
    patient.says("SERVICE")


# --- programs --------------------------------------------------------------------------------------------------


def _program(patient: Patient, run: str, ends_within_s: float = 60.0) -> None:
    """Another service runs it; the patient must not notice, and nothing of it stays."""
    text = (
        patient.file().replace(f"name: {NAME}", "name: odd").replace(f"replicas: {REPLICAS}", "replicas: 1")
    )
    patient.up(text[: text.index("run: ")] + f"run: |\n  {run}\n")
    time.sleep(FAULT_S)
    patient.says("SERVICE")
    patient.serve("down", "odd", "-y", "--purge")
    patient.wait_for(lambda: patient.view("odd") is None, "the odd service does not go down", ends_within_s)


_ENGINE = f"{sys.executable} -m skyserve_cli.engine --profile l4-8b --port $SKYSERVE_REPLICA_PORT"


def forks_away(patient: Patient) -> None:
    _program(patient, f"{_ENGINE} >/dev/null 2>&1 & sleep 2")


def ignores_sigterm(patient: Patient) -> None:
    _program(patient, f"trap '' TERM; {_ENGINE} & while :; do wait; sleep 0.2; done")


def logs_much(patient: Patient) -> None:
    """About 1 GB a minute."""
    _program(
        patient,
        f"{_ENGINE} & while :; do head -c 1600000 /dev/zero | tr '\\0' x | fold -w 1000; echo; sleep 0.1; done",
    )


def fills_the_disk(patient: Patient) -> None:
    """That of the home, as all local programs are on it. Space has to be made by hand, as the program takes all that is free."""
    text = (
        patient.file().replace(f"name: {NAME}", "name: odd").replace(f"replicas: {REPLICAS}", "replicas: 1")
    )
    fills = f"{_ENGINE} & while :; do head -c 10000000 /dev/zero >>junk 2>/dev/null; sleep 0.05; done"
    patient.up(text[: text.index("run: ")] + f"run: |\n  {fills}\n")
    patient.says("full")
    time.sleep(FAULT_S)
    for folder in patient.live_instances():
        record = folder.record()
        if record is not None and record.service == "odd":
            os.kill(patient.host_pid("odd", record.replica_id), signal.SIGKILL)
            for junk in folder.path.rglob("junk"):
                junk.unlink()
    patient.serve("down", "odd", "-y", "--purge")
    patient.wait_for(lambda: patient.view("odd") is None, "the odd service does not go down")


def port_in_use(patient: Patient) -> None:
    taken = f"{sys.executable} -m http.server --bind 127.0.0.1 $SKYSERVE_REPLICA_PORT"
    _program(patient, f"{taken} >/dev/null 2>&1 & sleep 1; exec {_ENGINE}")


HARD_OF_HEARING = "benchmarks.chaos.deaf_controller"
SHIFTED = "benchmarks.chaos.shifted_controller"
PG = "postgresql"
CELLS = (
    Cell("database: slow", slow_database, PG),
    Cell("database: hung", hung_database, PG),
    Cell("database: stopped", stopped_database, PG),
    Cell("database: failed over", failed_over_database, PG),
    Cell("database: no connection left", full_of_connections, PG),
    Cell("database: serialization errors", serialization_errors, PG),
    Cell("database: read-only", read_only_database, PG),
    Cell("database: deleted", deleted_database, is_short=True),
    Cell("database: an older copy, running", older_database, is_short=True),
    Cell("database: an older copy, at a start", older_database_at_start),
    Cell("database: corrupt pages", corrupt_page),
    Cell("database: full disk", full_disk, is_small=True),
    Cell("clock: back 1 h", clock_back, controller=SHIFTED),
    Cell("clock: forward 1 d", clock_forward, controller=SHIFTED),
    Cell("clock: suspended", suspended),
    Cell("network: no replica is reached", no_replica_reached, controller=HARD_OF_HEARING),
    Cell("network: one zone is not reached", one_zone_not_reached, controller=HARD_OF_HEARING),
    Cell("network: one cloud is not reached", one_cloud_not_reached, has_cluster=True),
    Cell("network: cut from the database with calls in flight", cut_from_database_with_calls, PG),
    Cell("process: kill -9 in a migration", killed_in_a_migration),
    Cell("process: older program, newer database", older_program, is_short=True),
    Cell("process: kill -9", killed),
    Cell("process: kill -9, PostgreSQL", killed, PG),
    Cell("process: three shells up one name", two_shells),
    Cell("process: Ctrl-C at each step", interrupted),
    Cell("load: 200 services", many_services),
    Cell("load: 5,000 events/s", many_events),
    Cell("load: a file of 10 MB", large_file, is_short=True),
    Cell("load: 1,000 updates", many_updates),
    Cell("program: forks away", forks_away),
    Cell("program: ignores SIGTERM", ignores_sigterm),
    Cell("program: 1 GB of logs a minute", logs_much),
    Cell("program: fills the disk", fills_the_disk, is_small=True),
    Cell("program: port in use", port_in_use),
)
