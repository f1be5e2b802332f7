"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create every table."""
    op.create_table(
        "projects",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
        sa.UniqueConstraint("name", name=op.f("uq_projects_name")),
    )
    op.create_table(
        "commits",
        sa.Column("project_id", sa.String(length=36), nullable=False),
        sa.Column("sha", sa.Text(), nullable=False),
        sa.Column("first_parent_sha", sa.Text(), nullable=True),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_commits_project_id")),
        sa.PrimaryKeyConstraint("project_id", "sha", name=op.f("pk_commits")),
    )
    op.create_table(
        "modules",
        sa.Column("project_id", sa.String(length=36), nullable=False),
        sa.Column("hash", sa.String(length=32), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_modules_project_id")),
        sa.PrimaryKeyConstraint("project_id", "hash", name=op.f("pk_modules")),
    )
    op.create_table(
        "patterns",
        sa.Column("project_id", sa.String(length=36), nullable=False),
        sa.Column("hash", sa.String(length=32), nullable=False),
        sa.Column("unordered", sa.Boolean(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_patterns_project_id")),
        sa.PrimaryKeyConstraint("project_id", "hash", name=op.f("pk_patterns")),
    )
    op.create_table(
        "sites",
        sa.Column("project_id", sa.String(length=36), nullable=False),
        sa.Column("hash", sa.String(length=32), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("group_name", sa.Text(), nullable=False),
        sa.Column("group_size", sa.Integer(), nullable=False),
        sa.Column("group_stride", sa.Integer(), nullable=False),
        sa.Column("module", sa.Text(), nullable=False),
        sa.Column("cause_src", sa.Text(), nullable=True),
        sa.Column("cause_dst", sa.Text(), nullable=True),
        sa.Column("cause_implicit", sa.Boolean(), nullable=True),
        sa.Column("cause_op", sa.Text(), nullable=True),
        sa.Column("dtype", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_sites_project_id")),
        sa.PrimaryKeyConstraint("project_id", "hash", name=op.f("pk_sites")),
    )
    op.create_table(
        "workloads",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("project_id", sa.String(length=36), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_workloads_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workloads")),
        sa.UniqueConstraint("project_id", "name", name=op.f("uq_workloads_project_id_name")),
    )
    op.create_table(
        "alerts",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("project_id", sa.String(length=36), nullable=False),
        sa.Column("workload_id", sa.String(length=36), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("run_id", sa.String(length=36), nullable=False),
        sa.Column("base_run_id", sa.String(length=36), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("change", sa.Text(), nullable=False),
        sa.Column("opened_unix_ns", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_alerts_project_id")),
        sa.ForeignKeyConstraint(["workload_id"], ["workloads.id"], name=op.f("fk_alerts_workload_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alerts")),
    )
    op.create_index(
        op.f("ix_alerts_project_id_state_opened_unix_ns"),
        "alerts",
        ["project_id", "state", "opened_unix_ns"],
        unique=False,
    )
    op.create_index(
        "uq_alerts_open",
        "alerts",
        ["workload_id", "fingerprint"],
        unique=True,
        sqlite_where=sa.text("state = 'open'"),
        postgresql_where=sa.text("state = 'open'"),
    )
    op.create_table(
        "lines",
        sa.Column("project_id", sa.String(length=36), nullable=False),
        sa.Column("hash", sa.String(length=32), nullable=False),
        sa.Column("pattern_hash", sa.String(length=32), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["project_id", "pattern_hash"],
            ["patterns.project_id", "patterns.hash"],
            name=op.f("fk_lines_project_id_pattern_hash"),
        ),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_lines_project_id")),
        sa.PrimaryKeyConstraint("project_id", "hash", name=op.f("pk_lines")),
    )
    op.create_table(
        "pattern_sites",
        sa.Column("project_id", sa.String(length=36), nullable=False),
        sa.Column("pattern_hash", sa.String(length=32), nullable=False),
        sa.Column("site_hash", sa.String(length=32), nullable=False),
        sa.Column("calls", sa.BigInteger(), nullable=True),
        sa.Column("modules", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["project_id", "pattern_hash"],
            ["patterns.project_id", "patterns.hash"],
            name=op.f("fk_pattern_sites_project_id_pattern_hash"),
        ),
        sa.ForeignKeyConstraint(
            ["project_id", "site_hash"],
            ["sites.project_id", "sites.hash"],
            name=op.f("fk_pattern_sites_project_id_site_hash"),
        ),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_pattern_sites_project_id")),
        sa.PrimaryKeyConstraint("project_id", "pattern_hash", "site_hash", name=op.f("pk_pattern_sites")),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("project_id", sa.String(length=36), nullable=False),
        sa.Column("workload_id", sa.String(length=36), nullable=False),
        sa.Column("commit_sha", sa.Text(), nullable=False),
        sa.Column("branch", sa.Text(), nullable=False),
        sa.Column("dirty", sa.Boolean(), nullable=False),
        sa.Column("script", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("reporting_ranks", sa.Integer(), nullable=False),
        sa.Column("started_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("last_seen_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("ended_unix_ns", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_runs_project_id")),
        sa.ForeignKeyConstraint(["workload_id"], ["workloads.id"], name=op.f("fk_runs_workload_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
    )
    op.create_index(
        op.f("ix_runs_project_id_branch_started_unix_ns"),
        "runs",
        ["project_id", "branch", "started_unix_ns"],
        unique=False,
    )
    op.create_index(op.f("ix_runs_project_id_commit_sha"), "runs", ["project_id", "commit_sha"], unique=False)
    op.create_index(op.f("ix_runs_project_id_started_unix_ns"), "runs", ["project_id", "started_unix_ns"], unique=False)
    op.create_index(op.f("ix_runs_state_last_seen_unix_ns"), "runs", ["state", "last_seen_unix_ns"], unique=False)
    op.create_index(
        op.f("ix_runs_workload_id_started_unix_ns"), "runs", ["workload_id", "started_unix_ns"], unique=False
    )
    op.create_table(
        "shapes",
        sa.Column("project_id", sa.String(length=36), nullable=False),
        sa.Column("hash", sa.String(length=32), nullable=False),
        sa.Column("pattern_hash", sa.String(length=32), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["project_id", "pattern_hash"],
            ["patterns.project_id", "patterns.hash"],
            name=op.f("fk_shapes_project_id_pattern_hash"),
        ),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_shapes_project_id")),
        sa.PrimaryKeyConstraint("project_id", "hash", name=op.f("pk_shapes")),
    )
    op.create_table(
        "alert_events",
        sa.Column("alert_id", sa.String(length=36), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("from_state", sa.Text(), nullable=False),
        sa.Column("to_state", sa.Text(), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["alert_id"], ["alerts.id"], name=op.f("fk_alert_events_alert_id")),
        sa.PrimaryKeyConstraint("alert_id", "sequence", name=op.f("pk_alert_events")),
    )
    op.create_table(
        "alert_runs",
        sa.Column("alert_id", sa.String(length=36), nullable=False),
        sa.Column("run_id", sa.String(length=36), nullable=False),
        sa.ForeignKeyConstraint(["alert_id"], ["alerts.id"], name=op.f("fk_alert_runs_alert_id")),
        sa.PrimaryKeyConstraint("alert_id", "run_id", name=op.f("pk_alert_runs")),
    )
    op.create_index(op.f("ix_alert_runs_run_id"), "alert_runs", ["run_id"], unique=False)
    op.create_table(
        "baselines",
        sa.Column("run_id", sa.String(length=36), nullable=False),
        sa.Column("workload_id", sa.String(length=36), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("accepted_unix_ns", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_baselines_run_id")),
        sa.ForeignKeyConstraint(["workload_id"], ["workloads.id"], name=op.f("fk_baselines_workload_id")),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_baselines")),
    )
    op.create_index(
        op.f("ix_baselines_workload_id_accepted_unix_ns"),
        "baselines",
        ["workload_id", "accepted_unix_ns"],
        unique=False,
    )
    op.create_table(
        "comparisons",
        sa.Column("head_run_id", sa.String(length=36), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("base_run_id", sa.String(length=36), nullable=True),
        sa.Column("verdict", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["head_run_id"], ["runs.id"], name=op.f("fk_comparisons_head_run_id")),
        sa.PrimaryKeyConstraint("head_run_id", "sequence", name=op.f("pk_comparisons")),
    )
    op.create_table(
        "ranks",
        sa.Column("run_id", sa.String(length=36), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("hostname", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("torch_version", sa.Text(), nullable=False),
        sa.Column("agent_version", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("acked_frame", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("calls", sa.BigInteger(), nullable=False),
        sa.Column("dropped_calls", sa.BigInteger(), nullable=False),
        sa.Column("dropped_steps", sa.BigInteger(), nullable=False),
        sa.Column("drop_reason", sa.Text(), nullable=False),
        sa.Column("rejected_frames", sa.BigInteger(), nullable=False),
        sa.Column("mesh", sa.Text(), nullable=True),
        sa.Column("device_type", sa.Text(), nullable=True),
        sa.Column("backend", sa.Text(), nullable=True),
        sa.Column("compile_mode", sa.Text(), nullable=True),
        sa.Column("modules_hash", sa.String(length=32), nullable=True),
        sa.Column("started_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("last_seen_unix_ns", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_ranks_run_id")),
        sa.PrimaryKeyConstraint("run_id", "attempt", "rank", name=op.f("pk_ranks")),
    )
    op.create_index(op.f("ix_ranks_state_last_seen_unix_ns"), "ranks", ["state", "last_seen_unix_ns"], unique=False)
    op.create_table(
        "shape_sites",
        sa.Column("project_id", sa.String(length=36), nullable=False),
        sa.Column("shapes_hash", sa.String(length=32), nullable=False),
        sa.Column("site_hash", sa.String(length=32), nullable=False),
        sa.Column("payload_bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["project_id", "shapes_hash"],
            ["shapes.project_id", "shapes.hash"],
            name=op.f("fk_shape_sites_project_id_shapes_hash"),
        ),
        sa.ForeignKeyConstraint(
            ["project_id", "site_hash"],
            ["sites.project_id", "sites.hash"],
            name=op.f("fk_shape_sites_project_id_site_hash"),
        ),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_shape_sites_project_id")),
        sa.PrimaryKeyConstraint("project_id", "shapes_hash", "site_hash", name=op.f("pk_shape_sites")),
    )
    op.create_table(
        "rejections",
        sa.Column("run_id", sa.String(length=36), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("frame", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "attempt", "rank"],
            ["ranks.run_id", "ranks.attempt", "ranks.rank"],
            name=op.f("fk_rejections_run_id_attempt_rank"),
        ),
        sa.PrimaryKeyConstraint("run_id", "attempt", "rank", "frame", name=op.f("pk_rejections")),
    )
    op.create_table(
        "step_ranges",
        sa.Column("run_id", sa.String(length=36), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("project_id", sa.String(length=36), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("pattern_hash", sa.String(length=32), nullable=False),
        sa.Column("shapes_hash", sa.String(length=32), nullable=True),
        sa.Column("lines_hash", sa.String(length=32), nullable=True),
        sa.Column("statistics", sa.LargeBinary(), nullable=True),
        sa.Column("statistics_steps", sa.BigInteger(), nullable=False),
        sa.Column("unfinished", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["project_id", "lines_hash"],
            ["lines.project_id", "lines.hash"],
            name=op.f("fk_step_ranges_project_id_lines_hash"),
        ),
        sa.ForeignKeyConstraint(
            ["project_id", "pattern_hash"],
            ["patterns.project_id", "patterns.hash"],
            name=op.f("fk_step_ranges_project_id_pattern_hash"),
        ),
        sa.ForeignKeyConstraint(
            ["project_id", "shapes_hash"],
            ["shapes.project_id", "shapes.hash"],
            name=op.f("fk_step_ranges_project_id_shapes_hash"),
        ),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_step_ranges_project_id")),
        sa.ForeignKeyConstraint(
            ["run_id", "attempt", "rank"],
            ["ranks.run_id", "ranks.attempt", "ranks.rank"],
            name=op.f("fk_step_ranges_run_id_attempt_rank"),
        ),
        sa.PrimaryKeyConstraint("run_id", "attempt", "rank", "number", name=op.f("pk_step_ranges")),
    )


def downgrade() -> None:
    """Drop every table."""
    op.drop_table("step_ranges")
    op.drop_table("rejections")
    op.drop_table("shape_sites")
    op.drop_index(op.f("ix_ranks_state_last_seen_unix_ns"), table_name="ranks")
    op.drop_table("ranks")
    op.drop_table("comparisons")
    op.drop_index(op.f("ix_baselines_workload_id_accepted_unix_ns"), table_name="baselines")
    op.drop_table("baselines")
    op.drop_index(op.f("ix_alert_runs_run_id"), table_name="alert_runs")
    op.drop_table("alert_runs")
    op.drop_table("alert_events")
    op.drop_table("shapes")
    op.drop_index(op.f("ix_runs_workload_id_started_unix_ns"), table_name="runs")
    op.drop_index(op.f("ix_runs_state_last_seen_unix_ns"), table_name="runs")
    op.drop_index(op.f("ix_runs_project_id_started_unix_ns"), table_name="runs")
    op.drop_index(op.f("ix_runs_project_id_commit_sha"), table_name="runs")
    op.drop_index(op.f("ix_runs_project_id_branch_started_unix_ns"), table_name="runs")
    op.drop_table("runs")
    op.drop_table("pattern_sites")
    op.drop_table("lines")
    op.drop_index(
        "uq_alerts_open",
        table_name="alerts",
        sqlite_where=sa.text("state = 'open'"),
        postgresql_where=sa.text("state = 'open'"),
    )
    op.drop_index(op.f("ix_alerts_project_id_state_opened_unix_ns"), table_name="alerts")
    op.drop_table("alerts")
    op.drop_table("workloads")
    op.drop_table("sites")
    op.drop_table("patterns")
    op.drop_table("modules")
    op.drop_table("commits")
    op.drop_table("projects")
