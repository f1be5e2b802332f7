"""Captures, requests for them, completeness, and the recorder's own cost.

Only adds tables and columns that may be null: the release before goes on serving while and after this runs.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

RANK_COUNTERS = ("expected_calls", "unverified_calls", "unattributed_calls", "recording_ns", "elapsed_ns")


def upgrade() -> None:
    """Create the tables and columns."""
    for name in RANK_COUNTERS:
        op.add_column("ranks", sa.Column(name, sa.BigInteger(), nullable=True))
    op.create_table(
        "completeness",
        *_rank_columns(),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("unattributed", sa.BigInteger(), nullable=False),
        sa.Column("unequal_steps", sa.BigInteger(), nullable=False),
        sa.Column("first_unequal_step", sa.BigInteger(), nullable=False),
        _of_rank("completeness"),
        sa.PrimaryKeyConstraint("run_id", "attempt", "rank", name=op.f("pk_completeness")),
    )
    op.create_table(
        "completeness_groups",
        *_rank_columns(),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("group_name", sa.Text(), nullable=False),
        sa.Column("group_size", sa.Integer(), nullable=False),
        sa.Column("group_stride", sa.Integer(), nullable=False),
        sa.Column("recorded", sa.BigInteger(), nullable=False),
        sa.Column("expected", sa.BigInteger(), nullable=True),
        sa.Column("source", sa.Text(), nullable=False),
        _of_rank("completeness_groups"),
        sa.PrimaryKeyConstraint("run_id", "attempt", "rank", "place", name=op.f("pk_completeness_groups")),
    )
    op.create_table(
        "captures",
        *_rank_columns(),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("last_part", sa.Boolean(), nullable=False),
        sa.Column("request", sa.BigInteger(), nullable=False),
        sa.Column("records", sa.BigInteger(), nullable=False),
        sa.Column("collectives", sa.BigInteger(), nullable=False),
        sa.Column("dropped_records", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("stored_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        _of_rank("captures"),
        sa.PrimaryKeyConstraint("run_id", "attempt", "rank", "step", "part", name=op.f("pk_captures")),
    )
    op.create_table(
        "capture_requests",
        sa.Column("run_id", sa.String(length=36), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("asked_by", sa.Text(), nullable=False),
        sa.Column("asked_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        _of_rank("capture_requests"),
        sa.PrimaryKeyConstraint("run_id", "number", "rank", name=op.f("pk_capture_requests")),
    )


def downgrade() -> None:
    """Drop them."""
    for table in ("capture_requests", "captures", "completeness_groups", "completeness"):
        op.drop_table(table)
    for name in reversed(RANK_COUNTERS):
        op.drop_column("ranks", name)


def _rank_columns() -> tuple[sa.Column[str], sa.Column[int], sa.Column[int]]:
    return (
        sa.Column("run_id", sa.String(length=36), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
    )


def _of_rank(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["run_id", "attempt", "rank"],
        ["ranks.run_id", "ranks.attempt", "ranks.rank"],
        name=op.f(f"fk_{table}_run_id_attempt_rank"),
    )
