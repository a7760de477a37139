"""Databases that cannot be used: damaged, of a newer release, away. Each is one sentence with the next step."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from skyserve_cli.app import run
from skyserve_cli.controller.api.client import ControllerClient, ControllerDownError
from skyserve_cli.controller.persistence.known_state import KnownState, write_known
from skyserve_cli.controller.persistence.moved import MovedTo, write_moved
from skyserve_cli.controller.persistence.opening import CannotOpenError, opened
from skyserve_cli.home import Home
from skyserve_cli.state.copies import copy_of_day
from skyserve_cli.state.database import Database
from skyserve_cli.state.opening import DamagedDatabaseError, NewerDatabaseError, check_file
from skyserve_cli.state.store import Store
from tests.unit.databases import KINDS, empty_database

DAY = 1_800_000_000.0


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home.from_environment({"SKYSERVE_HOME": str(tmp_path / "home")})
    home.create()
    return home


def fill(store: Store, services: int = 40) -> None:
    for number in range(services):
        store.put_service(
            f"s{number}",
            {"run": "x" * 900},
            replica_hash="h",
            sealed_secrets=b"",
            lb_port=1,
            target=0,
            mode=None,
            now=DAY,
        )
    store.close()


def damage(path: Path) -> None:
    """Overwrite every page but the first."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))


def make_newer(url: str) -> None:
    Store(Database(url)).close()
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '0999'"))
    engine.dispose()


def test_a_damaged_file_names_the_copy_and_the_command(home: Home) -> None:
    fill(opened(home))
    file = home.root / "state.db"
    first, second = (copy_of_day(file, home.backups, DAY + day * 86400.0) for day in range(2))
    damage(file)
    with pytest.raises(CannotOpenError) as raised:
        opened(home)
    assert raised.value.is_final
    assert str(file) in str(raised.value)
    assert f"serve controller restore {second} --force" in str(raised.value)
    assert str(first) not in str(raised.value)


def test_a_damaged_file_without_a_copy(home: Home) -> None:
    (home.root / "state.db").write_bytes(os.urandom(8192))
    with pytest.raises(CannotOpenError, match=r"there is no copy in .*backups"):
        opened(home)


@pytest.mark.parametrize("content", [None, b""], ids=["missing", "empty"])
def test_a_file_that_is_new_is_not_damaged(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "state.db"
    if content is not None:
        path.write_bytes(content)
    check_file(path)
    fill(Store(Database(f"sqlite:///{path}")), 1)
    check_file(path)
    damaged = tmp_path / "other.db"
    damaged.write_bytes(b"SQLite format 3\0" + b"\xff" * 9000)
    with pytest.raises(DamagedDatabaseError):
        check_file(damaged)


@pytest.mark.parametrize("kind", KINDS)
def test_a_newer_database_is_left_as_it_is(kind: str, tmp_path: Path) -> None:
    url = empty_database(kind, tmp_path)
    make_newer(url)
    with pytest.raises(NewerDatabaseError, match="revision 0999; this one knows up to 00"):
        Store(Database(url))
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalars().all() == [
            "0999"
        ]
    engine.dispose()


@pytest.mark.parametrize(
    ("url", "says", "is_final"),
    [
        pytest.param("postgresql+psycopg://me:hush@127.0.0.1:1/db", "start the database server", False, id="away"),
        pytest.param("postgresql+nodriver://x/y", "no usable database URL", True, id="no such driver"),
        pytest.param("what is this", "no usable database URL", True, id="no URL"),
    ],
)  # fmt: skip
def test_other_reasons(home: Home, url: str, says: str, is_final: bool) -> None:
    with pytest.raises(CannotOpenError, match=says) as raised:
        opened(Home(home.root, url))
    assert raised.value.is_final is is_final
    assert "hush" not in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "sqlalche.me" not in str(raised.value)


def make_damaged(home: Home) -> None:
    fill(Store(Database(home.database_url)))
    damage(home.root / "state.db")


def make_older(home: Home) -> None:
    store = Store(Database(home.database_url))
    write_known(home, KnownState(store.database.owner(), 1000))
    store.close()


def make_gone(home: Home) -> None:
    write_known(home, KnownState("ab12", 1000))


def make_wrong(home: Home) -> None:
    home.config.write_text("controller: {tick_seconds: fast}")


def make_moved(home: Home) -> None:
    write_moved(home, MovedTo("ssh/there", "prod"))


@pytest.mark.parametrize(
    ("spoil", "url", "code", "says"),
    [
        pytest.param(make_damaged, "", 4, "is damaged", id="damaged"),
        pytest.param(lambda home: make_newer(home.database_url), "", 4, "newer release", id="of a newer release"),
        pytest.param(make_older, "", 4, "older than the one that this home had", id="older"),
        pytest.param(make_gone, "", 4, "is gone, and this home had a database", id="gone"),
        pytest.param(lambda home: None, "what is this", 4, "no usable database URL", id="no URL"),
        pytest.param(lambda home: None, "postgresql+psycopg://me@127.0.0.1:1/db", 1, "start the database server", id="away"),
        pytest.param(make_wrong, "", 2, "controller.tick_seconds", id="wrong configuration"),
        pytest.param(make_moved, "", 2, "was moved to ssh/there", id="moved"),
    ],
)  # fmt: skip
def test_the_exit_code_of_a_start_is_the_documented_one_whoever_starts_it(
    home: Home, spoil: Callable[[Home], object], url: str, code: int, says: str
) -> None:
    spoil(home)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SKYSERVE_")}
    environment |= {"SKYSERVE_HOME": str(home.root), **({"SKYSERVE_DB": url} if url else {})}
    service = home.root / "chat.yaml"
    service.write_text("name: chat\nservice: {}\nresources: {infra: local}\nrun: x\n")
    for words in (
        ["controller", "start"],
        ["controller", "start", "--foreground"],
        ["up", str(service), "-y"],
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "skyserve_cli", *words],
            env=environment, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert (ended.returncode, ended.stdout) == (code, ""), (words, ended.stderr)
        assert says in ended.stderr.splitlines()[-1]
        assert "Traceback" not in ended.stderr


def test_the_last_line_that_is_shown_is_a_sentence(home: Home) -> None:
    home.controller_log.write_text(
        "sqlite3.DatabaseError: file is not a database\n[SQL: PRAGMA x]\n[parameters: ('v',)]\n"
        "(Background on this error at: https://sqlalche.me/e/21/4xp6)\n\n"
    )
    assert ControllerClient(home)._log_tail() == "sqlite3.DatabaseError: file is not a database"
    with pytest.raises(ControllerDownError):
        ControllerClient(home).health()


@pytest.mark.parametrize("command", [["gc", "--dry-run"], ["controller", "rotate"]], ids=" ".join)
def test_a_command_that_opens_the_database_itself_exits_as_a_start_does(
    command: list[str], home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_damaged(home)
    monkeypatch.setenv("SKYSERVE_HOME", str(home.root))
    monkeypatch.delenv("SKYSERVE_DB", raising=False)
    assert run(command) == 4
    assert "is damaged" in capsys.readouterr().err
