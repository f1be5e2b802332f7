"""The schema's history. Tables exist only through these revisions; a revision never imports the models.

Nothing here needs an ini file: the caller passes its connection.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

if TYPE_CHECKING:
    from sqlalchemy import Connection, MetaData


def configuration(connection: Connection | None = None, target_metadata: MetaData | None = None) -> Config:
    """Alembic's configuration for this folder. ``target_metadata`` is only needed to compare or to write revisions."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    config.attributes["target_metadata"] = target_metadata
    return config


def head() -> str:
    """The revision this release works with."""
    revision = ScriptDirectory.from_config(configuration()).get_current_head()
    assert revision is not None
    return revision


def knows(revision: str) -> bool:
    """Whether a revision belongs to this release's history; False for one that a newer release wrote."""
    return revision in {script.revision for script in ScriptDirectory.from_config(configuration()).walk_revisions()}


def current(connection: Connection) -> str | None:
    """The database's revision; None when it has none."""
    return MigrationContext.configure(connection).get_current_revision()


def upgrade(connection: Connection) -> None:
    """Bring the schema to ``head`` inside the connection's transaction, which the caller commits."""
    command.upgrade(configuration(connection), "head")
