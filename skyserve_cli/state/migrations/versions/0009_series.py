"""What load balancers have counted over time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "series",
        sa.Column("service", sa.String(63), primary_key=True),
        sa.Column("span", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("at", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("samples", sa.LargeBinary, nullable=False),
        sqlite_with_rowid=False,
    )
