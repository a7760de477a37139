"""Tokens of a team, and who set a goal."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "tokens",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("services", sa.JSON(none_as_null=True)),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("created_by", sa.String(63), nullable=False),
        sa.Column("revoked_at", sa.Float),
    )
    op.create_index("ix_tokens_digest", "tokens", ["digest"], unique=True)
    op.add_column("events", sa.Column("author", sa.String(63), nullable=False, server_default=""))
