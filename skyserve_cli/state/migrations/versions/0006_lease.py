"""One controller writes at a time: its lease. And whose keys the database was written with."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    lease = op.create_table(
        "lease",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("holder", sa.String(64), nullable=False),
        sa.Column("about", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("renewals", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
    )
    op.bulk_insert(
        lease, [{"id": 1, "holder": "", "about": "", "epoch": 0, "renewals": 0, "expires_at": 0.0}]
    )
    op.create_table(
        "fingerprints",
        sa.Column("key", sa.String(32), primary_key=True),
        sa.Column("value", sa.String(64), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("fingerprints")
    op.drop_table("lease")
