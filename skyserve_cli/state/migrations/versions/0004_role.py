"""Load balancer agents on machines of their own are rows beside the replicas."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("replicas", sa.Column("role", sa.String(16), nullable=False, server_default="replica"))


def downgrade() -> None:
    op.drop_column("replicas", "role")
