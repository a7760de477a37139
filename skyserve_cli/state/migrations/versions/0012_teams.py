"""Teams of tokens and of services."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    for table in ("services", "tokens"):
        op.add_column(table, sa.Column("team", sa.String(63), nullable=False, server_default=""))
