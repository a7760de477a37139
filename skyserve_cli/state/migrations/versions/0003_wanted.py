"""How many replicas the load needs, beside how many should serve."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("services", sa.Column("wanted", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("services", "wanted")
