"""One file from which a home can be made again: the rows of its database, its keys and its configuration.

It is a zip file:

    manifest.json       format, release, revision of the tables, when it was made, tables
    rows/TABLE.jsonl    a row per line
    home/FILE           sealing.key, digest.key, machines.key, config.yaml, as far as they are there

With a passphrase it is encrypted as a whole: SEALED, 16 bytes of salt, and a Fernet token whose key is derived by scrypt.
Without one, who can read the file can open all secrets and log in on all machines.

A daily copy (an SQLite file) can be restored as well; keys and configuration are then those of the home.
"""

from __future__ import annotations

import base64
import io
import json
import os
import secrets
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa
from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from sqlalchemy.engine import URL, make_url

from skyserve_cli import __version__
from skyserve_cli.controller.persistence.known_state import go_on_with
from skyserve_cli.home import Home, write_private
from skyserve_cli.state.connect import connected, without_limit
from skyserve_cli.state.export import (
    UnknownRevisionError,
    drop_all,
    has_rows,
    line_of,
    load,
    rows_of,
    tables_of,
)
from skyserve_cli.state.opening import DatabaseUnusableError, check_file, sqlite_file
from skyserve_cli.state.revisions import revision_of

FORMAT = 1
SEALED = b"skyserve sealed backup 1\n"
_SQLITE = b"SQLite format 3\0"
_SALT_BYTES = 16


class BackupError(Exception):
    """A backup cannot be made or restored; the text gives the reason and what to do."""


@dataclass(frozen=True, slots=True)
class Backup:
    """`files` are those of the home by name."""

    made_at: float
    revision: str
    rows: Mapping[str, list[dict[str, Any]]]
    files: Mapping[str, bytes]

    @property
    def owner(self) -> str:
        return next((str(row["owner"]) for row in self.rows.get("identity", ())), "")

    @property
    def changes(self) -> int:
        """As `Database.changes`."""
        return next((int(row["count"]) for row in self.rows.get("changes", ())), 0)

    def counts(self) -> str:
        return f"{len(self.rows['services'])} services, {sum(map(len, self.rows.values()))} rows"


def kept_files(home: Home) -> tuple[Path, ...]:
    return home.sealing_key_file, home.digest_key_file, home.machine_secret_file, home.config


# --- making one ---------------------------------------------------------------------------------------------


def write_backup(home: Home, target: Path, passphrase: str | None, now: float) -> str:
    """Write the backup of a home to a file; a controller may be running.

    Returns its content in words. Raises BackupError, SQLAlchemyError or OSError; the target is there whole or not at all.
    """
    made = packed(home, now)
    write_private(target, made.content if passphrase is None else sealed(made.content, passphrase))
    return made.words


class Packed(NamedTuple):
    """A backup that is not sealed, what it has in words, and the owner of its database."""

    content: bytes
    words: str
    owner: str


def packed(home: Home, now: float) -> Packed:
    """Return the backup of a home; a controller may be running.

    Raises BackupError, SQLAlchemyError or OSError.
    """
    file = sqlite_file(make_url(home.database_url))
    if file is not None and not file.exists():
        raise BackupError(
            f"there is no database at {file}, so there is nothing to back up; check SKYSERVE_HOME and SKYSERVE_DB"
        )
    out = io.BytesIO()
    with (
        _reading(make_url(home.database_url)) as c,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        without_limit(c)
        revision = revision_of(c)
        if revision is None:
            raise BackupError(
                f"{make_url(home.database_url).render_as_string()} has no tables, so there is nothing to back up"
            )
        tables = tables_of(c)
        owner = next((str(row["owner"]) for row in rows_of(c, "identity")), "")
        count = 0
        for name in tables:
            with archive.open(f"rows/{name}.jsonl", "w", force_zip64=True) as rows:
                for row in rows_of(c, name):
                    rows.write(line_of(row))
                    count += 1
        for path in kept_files(home):
            if path.exists():
                archive.writestr(f"home/{path.name}", path.read_bytes())
        manifest = {
            "format": FORMAT,
            "version": __version__,
            "revision": revision,
            "made_at": now,
            "tables": tables,
        }
        archive.writestr("manifest.json", json.dumps(manifest))
    words = f"{count} rows, {sum(path.exists() for path in kept_files(home))} files of the home"
    return Packed(out.getvalue(), words, owner)


@contextmanager
def _reading(url: URL) -> Iterator[sa.Connection]:
    """All of it in one transaction: one state of the database, without a pause for those who write."""
    engine = connected(url, in_memory=False)
    options = {} if url.get_backend_name() == "sqlite" else {"isolation_level": "REPEATABLE READ"}
    try:
        with engine.connect().execution_options(**options) as c:
            yield c
    finally:
        engine.dispose()


# --- reading one --------------------------------------------------------------------------------------------


def read_backup(source: Path, passphrase: str | None) -> Backup:
    """Return the backup, or daily copy, in a file. Raises BackupError or OSError."""
    with source.open("rb") as file:
        content = file.read(len(_SQLITE))
        if content == _SQLITE:
            return _of_copy(source)
        content += file.read()
    return parse_backup(content, passphrase, str(source))


def parse_backup(content: bytes, passphrase: str | None, source: str) -> Backup:
    """Return the backup in these bytes; `source` names them in errors. Raises BackupError."""
    if content.startswith(SEALED):
        if passphrase is None:
            raise BackupError(f"{source} is sealed; give its passphrase with --passphrase-file")
        content = _opened(content, passphrase, source)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            manifest = json.loads(archive.read("manifest.json"))
            if manifest["format"] != FORMAT:
                raise BackupError(
                    f"{source} was made by release {manifest['version']}; restore it with that release"
                )
            rows = {
                name: [json.loads(line) for line in archive.read(f"rows/{name}.jsonl").splitlines()]
                for name in manifest["tables"]
            }
            files = {
                name.removeprefix("home/"): archive.read(name)
                for name in archive.namelist()
                if name.startswith("home/")
            }
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise BackupError(f"{source} is no backup, or is damaged ({error})") from error
    return Backup(float(manifest["made_at"]), str(manifest["revision"]), rows, files)


def _of_copy(source: Path) -> Backup:
    try:
        check_file(source)
    except DatabaseUnusableError as error:
        raise BackupError(f"{error}; try an older copy") from error
    # `mode=ro`: a copy stays as it is, and no -wal file appears beside it.
    engine = sa.create_engine(f"sqlite:///file:{source.absolute()}?mode=ro&uri=true")
    try:
        with engine.connect() as c:
            revision = revision_of(c)
            if revision is None:
                raise BackupError(f"{source} is no database of skyserve")
            rows = {name: list(rows_of(c, name)) for name in tables_of(c)}
    finally:
        engine.dispose()
    return Backup(source.stat().st_mtime, revision, rows, {})


# --- restoring ----------------------------------------------------------------------------------------------


def restore(home: Home, backup: Backup, *, force: bool, now: float) -> Path | None:
    """Make the home what it was.

    The caller holds the controller's lock. Returns the folder with what was replaced, if there was anything. Raises
    BackupError, SQLAlchemyError or OSError; unless it returns, the database is as it was.
    """
    url = make_url(home.database_url)
    file = sqlite_file(url)
    _insist_on_empty(home, backup, url, force)
    # Before the database: one that is newer than the home knows is no trouble.
    go_on_with(home, backup.owner, backup.changes)
    try:
        if file is None:
            first_unknown = _fill(url, backup, empty=force)
            aside = _move_aside(home, (), backup, now)
        else:
            draft = file.with_name(f".{file.name}.restoring")
            draft.unlink(missing_ok=True)
            try:
                first_unknown = _fill(make_url(f"sqlite:///{draft}"), backup, empty=False)
                draft.chmod(0o600)
                parts = [file.with_name(f"{file.name}{end}") for end in ("", "-wal", "-shm")]
                aside = _move_aside(home, parts, backup, now)
                draft.replace(file)
            finally:
                draft.unlink(missing_ok=True)
    except UnknownRevisionError as error:
        raise BackupError(
            f"the backup was made by a newer release (revision {error}); install that release"
        ) from error
    for name, content in backup.files.items():
        if name in {path.name for path in kept_files(home)}:
            write_private(home.root / name, content)
    write_private(home.restored, json.dumps(first_unknown).encode())
    return aside


def expect_more_replicas(home: Home) -> None:
    """Have the next controller adopt machines that this state does not know: another controller has launched them.

    Raises SQLAlchemyError or OSError.
    """
    with _reading(make_url(home.database_url)) as c:
        first = {str(row["name"]): int(row["next_replica_id"]) for row in rows_of(c, "services")}
    write_private(home.restored, json.dumps(first).encode())


def _insist_on_empty(home: Home, backup: Backup, url: URL, force: bool) -> None:
    if force:
        return
    there = [path.name for path in kept_files(home) if path.exists() and path.name in backup.files]
    file = sqlite_file(url)
    if file is not None:
        there += [file.name] if file.exists() else []
    else:
        with _reading(url) as c:
            there += ["the database's rows"] if has_rows(c) else []
    if there:
        raise BackupError(
            f"{home.root} has {', '.join(there)}; with --force they are replaced, and the old ones are kept in {home.backups}"
        )


def _fill(url: URL, backup: Backup, *, empty: bool) -> dict[str, int]:
    engine = connected(url, in_memory=False)
    try:
        with engine.execution_options(writes=True).begin() as c:
            if empty or (url.get_backend_name() != "sqlite" and not has_rows(c)):
                drop_all(c)
            return load(c, backup.revision, backup.rows, backup.rows.__getitem__)
    finally:
        engine.dispose()


def _move_aside(home: Home, parts: list[Path] | tuple[Path, ...], backup: Backup, now: float) -> Path | None:
    replaced = [*parts, *(path for path in kept_files(home) if path.name in backup.files)]
    there = [path for path in replaced if path.exists()]
    if not there:
        return None
    home.backups.mkdir(mode=0o700, exist_ok=True)
    folder = home.backups / f"replaced-{time.strftime('%Y-%m-%dT%H%M%SZ', time.gmtime(now))}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for path in there:
        path.replace(folder / path.name)
    return folder


# --- sealing ------------------------------------------------------------------------------------------------


def sealed(content: bytes, passphrase: str) -> bytes:
    """Return the content encrypted with a key that follows from the passphrase."""
    salt = secrets.token_bytes(_SALT_BYTES)
    return SEALED + salt + _cipher(passphrase, salt).encrypt(content)


def _opened(content: bytes, passphrase: str, source: str) -> bytes:
    salt, token = content[len(SEALED) :][:_SALT_BYTES], content[len(SEALED) + _SALT_BYTES :]
    try:
        return _cipher(passphrase, salt).decrypt(token)
    except InvalidToken:
        raise BackupError(f"the passphrase does not open {source}, or the file is damaged") from None


def _cipher(passphrase: str, salt: bytes) -> Fernet:
    derived = Scrypt(salt=salt, length=32, n=1 << 15, r=8, p=1).derive(passphrase.encode())
    return Fernet(base64.urlsafe_b64encode(derived))


def read_passphrase(path: Path) -> str:
    """Return the first line of a file, or of standard input ("-"). Raises BackupError or OSError."""
    text = os.fdopen(0, closefd=False).readline() if str(path) == "-" else path.read_text()
    line = text.partition("\n")[0].rstrip("\r")
    if not line:
        raise BackupError(f"{path} has no passphrase on its first line")
    return line
