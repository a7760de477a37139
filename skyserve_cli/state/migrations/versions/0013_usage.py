"""What the requests of API keys have used, by day."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_table(
        "usage",
        sa.Column("service", sa.String(63), primary_key=True),
        sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("key", sa.String(512), primary_key=True),
        sa.Column("model", sa.String(512), primary_key=True),
        sa.Column("source", sa.String(63), primary_key=True),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("tokens_in", sa.BigInteger, nullable=False),
        sa.Column("tokens_out", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
