"""Tokens of the people who share a controller. Of a token only its SHA-256 is stored."""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa

from skyserve_cli.state import tables as t
from skyserve_cli.state.database import Database

TOKEN_PREFIX = "sks_"  # noqa: S105 - what a token begins with

_T = t.tokens.c


class TokenExistsError(Exception):
    """A token of that name has not been revoked."""


class NoSuchTokenError(Exception):
    """No token of that name can be revoked."""


class TokenRow(NamedTuple):
    """`services` are those that the token covers, None: all. `team` is that of the services its holder starts. Instants are UNIX seconds."""

    name: str
    role: str
    services: tuple[str, ...] | None
    created_at: float
    created_by: str
    revoked_at: float | None
    team: str = ""


class TeamTokens:
    """The verbs about tokens: one method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add_token(self, row: TokenRow, digest: str) -> None:
        """Store a token; a revoked one of that name is replaced. Raises TokenExistsError."""
        with self._database.writing() as c:
            found = c.execute(sa.select(_T.revoked_at).where(_T.name == row.name)).first()
            if found is not None and found.revoked_at is None:
                raise TokenExistsError(row.name)
            c.execute(t.tokens.delete().where(_T.name == row.name))
            services = None if row.services is None else list(row.services)
            c.execute(t.tokens.insert().values(**{**row._asdict(), "services": services, "digest": digest}))

    def revoke_token(self, name: str, now: float) -> None:
        """Raise NoSuchTokenError where there is none, or it is revoked already."""
        where = sa.and_(_T.name == name, _T.revoked_at.is_(None))
        with self._database.writing() as c:
            if not c.execute(t.tokens.update().where(where).values(revoked_at=now)).rowcount:
                raise NoSuchTokenError(name)

    def tokens(self) -> list[TokenRow]:
        """Return all tokens, revoked ones too, by name."""
        with self._database.reading() as c:
            return [_row(found) for found in c.execute(sa.select(t.tokens).order_by(_T.name))]

    def token_changes(self) -> tuple[object, ...]:
        """Return what differs when a token was created or revoked: one cheap query."""
        query = sa.select(
            sa.func.count(_T.name),
            sa.func.count(_T.revoked_at),
            sa.func.max(_T.revoked_at),
            sa.func.max(_T.created_at),
        )
        with self._database.reading() as c:
            return tuple(c.execute(query).one())

    def token_with(self, *, digest: str = "", name: str = "") -> TokenRow | None:
        """Return the token with this SHA-256 or, without one, of this name; None if it is unknown or revoked."""
        where = _T.digest == digest if digest else _T.name == name
        with self._database.reading() as c:
            found = c.execute(sa.select(t.tokens).where(where, _T.revoked_at.is_(None))).first()
        return None if found is None else _row(found)


def _row(found: sa.Row[tuple[object, ...]]) -> TokenRow:
    services = None if found.services is None else tuple(found.services)
    return TokenRow(
        found.name, found.role, services, found.created_at, found.created_by, found.revoked_at, found.team
    )
