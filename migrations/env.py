"""Alembic's way to the registry: the connection that rmvdb.registry.schema hands over, or the database that the settings name."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from rmvdb.app import config
from rmvdb.registry import schema
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import Table


def migrate(connection: Connection) -> None:
    """Run the asked command on this connection, in the transaction that it is in."""
    context.configure(
        connection=connection,
        target_metadata=Table.metadata,
        version_table=schema.REVISION_TABLE,
        render_as_batch=True,  # SQLite changes a column only by making the table again
    )
    with context.begin_transaction():
        context.run_migrations()


if (given := context.config.attributes.get("connection")) is not None:
    migrate(given)
else:
    registry = Registry(config.load().registry.url.get_secret_value())
    with registry.engine.begin() as own:
        migrate(own)
    registry.close()
