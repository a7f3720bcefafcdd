"""The registry's schema as a chain of Alembic revisions, brought up to date by `manylora.registry.database`.

A change of `tables` comes with a new revision in `versions/` and its name at the end of `REVISIONS`. Revisions are
never edited once released. The names are listed here so that an up-to-date database is recognised without loading
Alembic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy import Connection

REVISIONS = ("0001",)
HEAD = REVISIONS[-1]


def upgrade(connection: Connection) -> None:
    """Bring the schema to `HEAD` within the connection's open transaction."""
    from pathlib import Path

    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
