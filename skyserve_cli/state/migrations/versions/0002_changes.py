"""A count of changes, so that a reader knows whether anything is new."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    changes = op.create_table(
        "changes",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.bulk_insert(changes, [{"id": 1, "count": 0}])


def downgrade() -> None:
    op.drop_table("changes")
