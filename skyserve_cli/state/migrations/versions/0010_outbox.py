"""Notifications on their way."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_table(
        "outbox",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("destination", sa.String(31), nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        sa.Column("message", sa.JSON, nullable=False),
    )
    op.create_index("ix_outbox_destination", "outbox", ["destination", "attempts", "seq"])
    op.create_table(
        "alarms",
        sa.Column("service", sa.String(63), primary_key=True),
        sa.Column("kind", sa.String(32), primary_key=True),
        sa.Column("since", sa.Float),
        sa.Column("notified_at", sa.Float),
        sa.Column("announced", sa.Boolean, nullable=False),
    )
