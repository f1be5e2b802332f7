"""Collectives that were captured into CUDA graphs.

Only adds a column that may be null: the release before goes on serving while and after this runs.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("completeness", sa.Column("graph_calls", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("completeness", "graph_calls")
