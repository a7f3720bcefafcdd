"""Alembic's entry: runs the revisions on the connection, and in the transaction, that the registry hands over."""

from __future__ import annotations

from alembic import context

from manylora.registry.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
