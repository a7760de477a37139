"""When a replica's machine goes, as announced long before."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("replicas", sa.Column("retire_at", sa.Float))


def downgrade() -> None:
    op.drop_column("replicas", "retire_at")
