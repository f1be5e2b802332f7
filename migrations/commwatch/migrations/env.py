"""Run by Alembic for each command: ``config.attributes`` holds the connection, or the ``url`` to open one."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine


def run(connection: Connection) -> None:
    """Apply the revisions on the caller's connection, in the caller's transaction where it has begun one."""
    context.configure(
        connection=connection,
        target_metadata=context.config.attributes.get("target_metadata"),
        render_as_batch=False,
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    engine = create_engine(context.config.attributes["url"])
    with engine.begin() as opened:
        run(opened)
    engine.dispose()
