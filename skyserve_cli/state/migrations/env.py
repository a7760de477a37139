"""Alembic's entry: migrations run over the connection the store hands in."""

from __future__ import annotations

from alembic import context

from skyserve_cli.state.tables import metadata

context.configure(
    connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()
