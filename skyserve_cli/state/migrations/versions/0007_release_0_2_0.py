"""The shape of release 0.2.0, the first one that there was."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "events",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("service", sa.String(length=63), nullable=False),
        sa.Column("replica_id", sa.Integer(), nullable=True),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("ix_events_service_seq", "events", ["service", "seq"], unique=False)
    op.create_table(
        "identity",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(length=32), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "kills",
        sa.Column("service", sa.String(length=63), nullable=False),
        sa.Column("replica_id", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("service", "replica_id"),
    )
    op.create_table(
        "replicas",
        sa.Column("service", sa.String(length=63), nullable=False),
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("since", sa.Float(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("cloud", sa.String(length=32), nullable=False),
        sa.Column("region", sa.String(length=64), nullable=False),
        sa.Column("zone", sa.String(length=64), nullable=False),
        sa.Column("instance_type", sa.String(length=64), nullable=False),
        sa.Column("accelerator", sa.String(length=64), nullable=True),
        sa.Column("accelerator_count", sa.Float(), nullable=False),
        sa.Column("capacity_type", sa.String(length=16), nullable=False),
        sa.Column("price_usd_hour", sa.Float(), nullable=False),
        sa.Column("on_demand_usd_hour", sa.Float(), nullable=True),
        sa.Column("instance_id", sa.String(length=255), nullable=True),
        sa.Column("endpoint", sa.String(length=255), nullable=True),
        sa.Column("launched_at", sa.Float(), nullable=True),
        sa.Column("ready_at", sa.Float(), nullable=True),
        sa.Column("drain_by", sa.Float(), nullable=True),
        sa.Column("preempt_at", sa.Float(), nullable=True),
        sa.Column("retire_at", sa.Float(), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("end_reason", sa.String(length=16), nullable=True),
        sa.Column("role", sa.String(length=16), nullable=False, server_default="replica"),
        sa.Column("choice", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("message", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("service", "id"),
    )
    op.create_index("ix_replicas_state", "replicas", ["state"], unique=False)
    op.create_table(
        "services",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("incarnation", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("update_mode", sa.String(length=16), nullable=False),
        sa.Column("down", sa.Boolean(), nullable=False),
        sa.Column("purge", sa.Boolean(), nullable=False),
        sa.Column("wanted", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("target", sa.Integer(), nullable=False),
        sa.Column("notes", sa.Text(), nullable=False),
        sa.Column("next_replica_id", sa.Integer(), nullable=False),
        sa.Column("memory", sa.JSON(), nullable=False),
        sa.Column("lb_port", sa.Integer(), nullable=False),
        sa.Column("folded_usd", sa.Float(), nullable=False),
        sa.Column("folded_on_demand_usd", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "versions",
        sa.Column("service", sa.String(length=63), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("replica_hash", sa.String(length=64), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("sealed_secrets", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("service", "version"),
    )
    changes = op.create_table(
        "changes",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.bulk_insert(changes, [{"id": 1, "count": 0}])
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
