from __future__ import annotations

from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from commwatch import migrations
from commwatch.service.domain.records import Completeness
from commwatch.service.store.contract import SchemaError
from commwatch.service.store.opening import open_store
from commwatch.service.store.schema import metadata


def test_migrations_make_exactly_the_schema(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'new.db'}")
    with engine.begin() as connection:
        migrations.upgrade(connection)
        assert migrations.current(connection) == migrations.head()
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
        # compare_metadata does not see primary keys, nor conditions of indexes.
        inspector = inspect(connection)
        for table in metadata.sorted_tables:
            expected = [column.name for column in table.primary_key.columns]
            assert inspector.get_pk_constraint(table.name)["constrained_columns"] == expected, table.name
        (unique,) = [index for index in inspector.get_indexes("alerts") if index["name"] == "uq_alerts_open"]
        assert str(unique["dialect_options"]["sqlite_where"]) == "state = 'open'"
    engine.dispose()


def test_the_schema_is_valid_for_postgresql_and_can_be_distributed_by_run() -> None:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]  # SQLAlchemy leaves dialects untyped
    for table in metadata.sorted_tables:
        assert f"CREATE TABLE {table.name}" in str(CreateTable(table).compile(dialect=dialect))
        for index in table.indexes:
            assert "CREATE" in str(CreateIndex(index).compile(dialect=dialect))
    by_run = ("ranks", "step_ranges", "rejections", "completeness", "completeness_groups", "captures")
    for name in (*by_run, "capture_requests"):
        assert next(iter(metadata.tables[name].primary_key.columns)).name == "run_id"


def test_a_database_of_the_first_schema_is_upgraded_with_what_it_holds(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'old.db'}"
    engine = create_engine(url)
    run = "'r', 'p', 'w', 'abc', 'main', 0, 'train.py', 'complete', 0, 1, 1, 1700000000, 1700000001, 1700000001"
    counters = "'clean', '', 2, 10, 30, 0, 0, '', 0, NULL, NULL, NULL, NULL, NULL, 1700000000, 1700000001"
    with engine.begin() as connection:
        command.upgrade(migrations.configuration(connection), "0001")
        for table, values in (
            ("projects", "'p', 'default'"),
            ("workloads", "'w', 'p', 'train'"),
            ("runs", run),
            ("ranks", f"'r', 0, 0, 'host0', 1000, '2.13.0', '0.1.0', {counters}"),
        ):
            connection.exec_driver_sql(f"INSERT INTO {table} VALUES ({values})")
    engine.dispose()
    with pytest.raises(SchemaError, match=r"has schema 0001, this release needs 0003"):
        open_store(url, migrate=False)
    store = open_store(url, migrate=True)
    (rank,) = store.ranks("r")
    assert (rank.steps, rank.calls, rank.expected_calls, rank.elapsed_ns, rank.completeness) == (
        10,
        30,
        None,
        None,
        None,
    )
    assert store.captures("r") == []
    assert store.ask_captures("r", [0], 1, "Ada", 1700000002) == 1
    store.close()


def test_completeness_of_the_second_schema_is_kept_and_tells_of_no_graph(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'old.db'}"
    engine = create_engine(url)
    run = "'r', 'p', 'w', 'abc', 'main', 0, 'train.py', 'complete', 0, 1, 1, 1700000000, 1700000001, 1700000001"
    facts = "0, NULL, NULL, NULL, NULL, NULL, 1700000000, 1700000001, 9, 0, 1, 5, 90"
    with engine.begin() as connection:
        command.upgrade(migrations.configuration(connection), "0002")
        for table, values in (
            ("projects", "'p', 'default'"),
            ("workloads", "'w', 'p', 'train'"),
            ("runs", run),
            ("ranks", f"'r', 0, 0, 'host0', 1000, '2.13.0', '0.1.0', 'clean', '', 2, 10, 30, 0, 0, '', {facts}"),
            ("completeness", "'r', 0, 0, 10, 1, 0, 0"),
        ):
            connection.exec_driver_sql(f"INSERT INTO {table} VALUES ({values})")
    engine.dispose()
    store = open_store(url, migrate=True)
    (rank,) = store.ranks("r")
    assert rank.completeness == Completeness(10, (), 1, 0, 0, graph_calls=0)
    store.close()
    # The release before goes on storing what it knows.
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM completeness")
        connection.exec_driver_sql(
            "INSERT INTO completeness (run_id, attempt, rank, step, unattributed, unequal_steps, first_unequal_step)"
            " VALUES ('r', 0, 0, 11, 2, 0, 0)"
        )
    engine.dispose()
    store = open_store(url, migrate=False)
    assert store.ranks("r")[0].completeness == Completeness(11, (), 2, 0, 0, graph_calls=0)
    store.close()


def test_downgrade_leaves_an_empty_database(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'new.db'}")
    with engine.begin() as connection:
        migrations.upgrade(connection)
    with engine.begin() as connection:
        command.downgrade(migrations.configuration(connection), "base")
        assert inspect(connection).get_table_names() == ["alembic_version"]
    engine.dispose()


def test_a_revision_never_imports_the_models() -> None:
    revisions = sorted((Path(migrations.__file__).parent / "versions").glob("*.py"))
    assert [path.name for path in revisions] == [
        "0001_first_schema.py",
        "0002_captures_and_completeness.py",
        "0003_cuda_graphs.py",
    ]
    for path in revisions:
        assert "commwatch" not in path.read_text()
