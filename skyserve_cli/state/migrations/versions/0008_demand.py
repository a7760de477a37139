"""What services were asked for, minute by minute."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "demand",
        sa.Column("service", sa.String(63), primary_key=True),
        sa.Column("span", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("minute", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("requests", sa.Float, nullable=False),
        sa.Column("prompt_tokens", sa.Float, nullable=False),
        sa.Column("response_tokens", sa.Float, nullable=False),
        sa.Column("late", sa.Float, nullable=False),
        sa.Column("ready", sa.Float, nullable=False),
        sqlite_with_rowid=False,
    )
