"""The tables, as the migrations make them. A test compares both.

Ids are UUIDs and hashes 32 hexadecimal characters, both as text; times are Unix nanoseconds; sizes are bytes.
Primary and unique keys of tables that grow with runs include the run's id, so that they can be distributed by it;
content-addressed tables are keyed by (project, hash). Bodies are ``codec`` blobs. All tables stand in this one file,
however long, because it is read as one.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    }
)


def _id(name: str, *args: object, primary_key: bool = False, nullable: bool = False) -> Column[str]:
    return Column(name, String(36), *args, primary_key=primary_key, nullable=nullable)  # type: ignore[arg-type]


def _hash(name: str, *, nullable: bool = False) -> Column[str]:
    return Column(name, String(32), nullable=nullable)


def _text(name: str, *, nullable: bool = False) -> Column[str]:
    return Column(name, Text, nullable=nullable)


def _big(name: str, *, nullable: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=nullable)


def _int(name: str) -> Column[int]:
    return Column(name, Integer, nullable=False)


def _flag(name: str, *, nullable: bool = False) -> Column[bool]:
    return Column(name, Boolean, nullable=nullable)


projects = Table(
    "projects",
    metadata,
    _id("id", primary_key=True),
    _text("name"),
    UniqueConstraint("name"),
)

workloads = Table(
    "workloads",
    metadata,
    _id("id", primary_key=True),
    _id("project_id", ForeignKey("projects.id")),
    _text("name"),
    UniqueConstraint("project_id", "name"),
)

commits = Table(
    "commits",
    metadata,
    _id("project_id", ForeignKey("projects.id")),
    _text("sha"),
    # Unknown where the reported chain ends.
    _text("first_parent_sha", nullable=True),
    _text("subject"),
    PrimaryKeyConstraint("project_id", "sha"),
)

runs = Table(
    "runs",
    metadata,
    _id("id", primary_key=True),
    _id("project_id", ForeignKey("projects.id")),
    _id("workload_id", ForeignKey("workloads.id")),
    _text("commit_sha"),
    _text("branch"),
    _flag("dirty"),
    _text("script"),
    _text("state"),
    # The newest attempt, its number of ranks, and how many of them report: fewer where one process stands for all.
    _int("attempt"),
    _int("world_size"),
    _int("reporting_ranks"),
    _big("started_unix_ns"),
    _big("last_seen_unix_ns"),
    _big("ended_unix_ns", nullable=True),
    Index(None, "project_id", "started_unix_ns"),
    Index(None, "workload_id", "started_unix_ns"),
    Index(None, "project_id", "commit_sha"),
    Index(None, "project_id", "branch", "started_unix_ns"),
    Index(None, "state", "last_seen_unix_ns"),
)

ranks = Table(
    "ranks",
    metadata,
    _id("run_id", ForeignKey("runs.id")),
    _int("attempt"),
    _int("rank"),
    _text("hostname"),
    _int("pid"),
    _text("torch_version"),
    _text("agent_version"),
    _text("state"),
    # How it ended, in words.
    _text("detail"),
    # The cursor: number of the last frame stored.
    _big("acked_frame"),
    _big("steps"),
    _big("calls"),
    _big("dropped_calls"),
    _big("dropped_steps"),
    _text("drop_reason"),
    _big("rejected_frames"),
    # Facts; device_type is null until the rank reported them.
    _text("mesh", nullable=True),
    _text("device_type", nullable=True),
    _text("backend", nullable=True),
    _text("compile_mode", nullable=True),
    _hash("modules_hash", nullable=True),
    _big("started_unix_ns"),
    _big("last_seen_unix_ns"),
    # Counters that older agents do not send: null until one came.
    _big("expected_calls", nullable=True),
    _big("unverified_calls", nullable=True),
    _big("unattributed_calls", nullable=True),
    _big("recording_ns", nullable=True),
    _big("elapsed_ns", nullable=True),
    PrimaryKeyConstraint("run_id", "attempt", "rank"),
    Index(None, "state", "last_seen_unix_ns"),
)

patterns = Table(
    "patterns",
    metadata,
    _id("project_id", ForeignKey("projects.id")),
    _hash("hash"),
    _flag("unordered"),
    Column("body", LargeBinary, nullable=False),
    PrimaryKeyConstraint("project_id", "hash"),
)

sites = Table(
    "sites",
    metadata,
    _id("project_id", ForeignKey("projects.id")),
    _hash("hash"),
    _text("phase"),
    _text("kind"),
    _text("group_name"),
    _int("group_size"),
    _int("group_stride"),
    _text("module"),
    # All four null when there is no redistribute behind the call.
    _text("cause_src", nullable=True),
    _text("cause_dst", nullable=True),
    _flag("cause_implicit", nullable=True),
    _text("cause_op", nullable=True),
    _text("dtype"),
    PrimaryKeyConstraint("project_id", "hash"),
)

pattern_sites = Table(
    "pattern_sites",
    metadata,
    _id("project_id", ForeignKey("projects.id")),
    _hash("pattern_hash"),
    _hash("site_hash"),
    # Null for an unordered pattern: its counts stand in the statistics of the ranges.
    _big("calls", nullable=True),
    # Number of distinct unfolded modules.
    _big("modules"),
    PrimaryKeyConstraint("project_id", "pattern_hash", "site_hash"),
    ForeignKeyConstraint(["project_id", "pattern_hash"], ["patterns.project_id", "patterns.hash"]),
    ForeignKeyConstraint(["project_id", "site_hash"], ["sites.project_id", "sites.hash"]),
)

shapes = Table(
    "shapes",
    metadata,
    _id("project_id", ForeignKey("projects.id")),
    _hash("hash"),
    _hash("pattern_hash"),
    Column("body", LargeBinary, nullable=False),
    PrimaryKeyConstraint("project_id", "hash"),
    ForeignKeyConstraint(["project_id", "pattern_hash"], ["patterns.project_id", "patterns.hash"]),
)

shape_sites = Table(
    "shape_sites",
    metadata,
    _id("project_id", ForeignKey("projects.id")),
    _hash("shapes_hash"),
    _hash("site_hash"),
    # Sum over the site's calls of one step.
    _big("payload_bytes"),
    PrimaryKeyConstraint("project_id", "shapes_hash", "site_hash"),
    ForeignKeyConstraint(["project_id", "shapes_hash"], ["shapes.project_id", "shapes.hash"]),
    ForeignKeyConstraint(["project_id", "site_hash"], ["sites.project_id", "sites.hash"]),
)

lines = Table(
    "lines",
    metadata,
    _id("project_id", ForeignKey("projects.id")),
    _hash("hash"),
    _hash("pattern_hash"),
    Column("body", LargeBinary, nullable=False),
    PrimaryKeyConstraint("project_id", "hash"),
    ForeignKeyConstraint(["project_id", "pattern_hash"], ["patterns.project_id", "patterns.hash"]),
)

modules = Table(
    "modules",
    metadata,
    _id("project_id", ForeignKey("projects.id")),
    _hash("hash"),
    Column("body", LargeBinary, nullable=False),
    PrimaryKeyConstraint("project_id", "hash"),
)

step_ranges = Table(
    "step_ranges",
    metadata,
    _id("run_id"),
    _int("attempt"),
    _int("rank"),
    _big("number"),
    _id("project_id", ForeignKey("projects.id")),
    _big("first_step"),
    _big("last_step"),
    _big("steps"),
    _hash("pattern_hash"),
    _hash("shapes_hash", nullable=True),
    _hash("lines_hash", nullable=True),
    Column("statistics", LargeBinary, nullable=True),
    _big("statistics_steps"),
    _flag("unfinished"),
    PrimaryKeyConstraint("run_id", "attempt", "rank", "number"),
    ForeignKeyConstraint(["run_id", "attempt", "rank"], ["ranks.run_id", "ranks.attempt", "ranks.rank"]),
    ForeignKeyConstraint(["project_id", "pattern_hash"], ["patterns.project_id", "patterns.hash"]),
    ForeignKeyConstraint(["project_id", "shapes_hash"], ["shapes.project_id", "shapes.hash"]),
    ForeignKeyConstraint(["project_id", "lines_hash"], ["lines.project_id", "lines.hash"]),
)

completeness = Table(
    "completeness",
    metadata,
    _id("run_id"),
    _int("attempt"),
    _int("rank"),
    # The last finished step it covers.
    _big("step"),
    _big("unattributed"),
    _big("unequal_steps"),
    _big("first_unequal_step"),
    # Null where a release before 0003 stored it.
    _big("graph_calls", nullable=True),
    PrimaryKeyConstraint("run_id", "attempt", "rank"),
    ForeignKeyConstraint(["run_id", "attempt", "rank"], ["ranks.run_id", "ranks.attempt", "ranks.rank"]),
)

completeness_groups = Table(
    "completeness_groups",
    metadata,
    _id("run_id"),
    _int("attempt"),
    _int("rank"),
    # In order of first use, from 0: two groups may have equal names, sizes and strides.
    _int("place"),
    _text("group_name"),
    _int("group_size"),
    _int("group_stride"),
    _big("recorded"),
    # Null where the group has no second source; that is empty then.
    _big("expected", nullable=True),
    _text("source"),
    PrimaryKeyConstraint("run_id", "attempt", "rank", "place"),
    ForeignKeyConstraint(["run_id", "attempt", "rank"], ["ranks.run_id", "ranks.attempt", "ranks.rank"]),
)

captures = Table(
    "captures",
    metadata,
    _id("run_id"),
    _int("attempt"),
    _int("rank"),
    _big("step"),
    # From 1; the last one says so.
    _int("part"),
    _flag("last_part"),
    # 0 where the job's settings asked for it.
    _big("request"),
    _big("records"),
    # Collectives of its records.
    _big("collectives"),
    _big("dropped_records"),
    _text("reason"),
    _big("stored_unix_ns"),
    Column("body", LargeBinary, nullable=False),
    PrimaryKeyConstraint("run_id", "attempt", "rank", "step", "part"),
    ForeignKeyConstraint(["run_id", "attempt", "rank"], ["ranks.run_id", "ranks.attempt", "ranks.rank"]),
)

capture_requests = Table(
    "capture_requests",
    metadata,
    _id("run_id"),
    # From 1 in each run; shared by the ranks that were asked together.
    _big("number"),
    _int("rank"),
    _int("attempt"),
    _int("steps"),
    _text("asked_by"),
    _big("asked_unix_ns"),
    # asked, sent, captured or refused; one that is not answered when its rank ended counts as missed.
    _text("state"),
    # Why it was refused.
    _text("reason"),
    PrimaryKeyConstraint("run_id", "number", "rank"),
    ForeignKeyConstraint(["run_id", "attempt", "rank"], ["ranks.run_id", "ranks.attempt", "ranks.rank"]),
)

rejections = Table(
    "rejections",
    metadata,
    _id("run_id"),
    _int("attempt"),
    _int("rank"),
    _big("frame"),
    _text("reason"),
    _big("at_unix_ns"),
    PrimaryKeyConstraint("run_id", "attempt", "rank", "frame"),
    ForeignKeyConstraint(["run_id", "attempt", "rank"], ["ranks.run_id", "ranks.attempt", "ranks.rank"]),
)

baselines = Table(
    "baselines",
    metadata,
    _id("run_id", ForeignKey("runs.id"), primary_key=True),
    _id("workload_id", ForeignKey("workloads.id")),
    _text("reason"),
    _text("author"),
    _big("accepted_unix_ns"),
    Index(None, "workload_id", "accepted_unix_ns"),
)

comparisons = Table(
    "comparisons",
    metadata,
    _id("head_run_id", ForeignKey("runs.id")),
    # 1 for the first comparison of a run.
    _int("sequence"),
    _id("base_run_id", nullable=True),
    _text("verdict"),
    _text("reason"),
    _big("at_unix_ns"),
    PrimaryKeyConstraint("head_run_id", "sequence"),
)

alerts = Table(
    "alerts",
    metadata,
    _id("id", primary_key=True),
    _id("project_id", ForeignKey("projects.id")),
    _id("workload_id", ForeignKey("workloads.id")),
    _text("fingerprint"),
    _text("state"),
    # The run that opened it, and the one it was compared with.
    _id("run_id"),
    _id("base_run_id"),
    _text("title"),
    # JSON.
    _text("change"),
    _big("opened_unix_ns"),
    Index(None, "project_id", "state", "opened_unix_ns"),
    # One cause is open once.
    Index(
        "uq_alerts_open",
        "workload_id",
        "fingerprint",
        unique=True,
        sqlite_where=text("state = 'open'"),
        postgresql_where=text("state = 'open'"),
    ),
)

alert_runs = Table(
    "alert_runs",
    metadata,
    # Every run that showed the alert, the one that opened it included.
    _id("alert_id", ForeignKey("alerts.id")),
    _id("run_id"),
    PrimaryKeyConstraint("alert_id", "run_id"),
    Index(None, "run_id"),
)

alert_events = Table(
    "alert_events",
    metadata,
    _id("alert_id", ForeignKey("alerts.id")),
    _int("sequence"),
    _big("at_unix_ns"),
    _text("from_state"),
    _text("to_state"),
    _text("author"),
    _text("reason"),
    PrimaryKeyConstraint("alert_id", "sequence"),
)
