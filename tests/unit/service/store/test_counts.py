"""The counts per site that SQL joins on."""

from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path

from sqlalchemy import create_engine, text

from commwatch.service.domain.records import BytesStatistics
from commwatch.service.store import codec
from commwatch.service.store.contract import StreamWrite
from commwatch.service.store.ids import uuid7
from commwatch.service.store.opening import open_store
from tests.contract.samples import NOW, hello, key, lines, modules, pattern, shapes


def test_sites_count_calls_modules_and_bytes_of_one_step(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'new.db'}"
    store = open_store(url, migrate=True)
    store.open_stream(hello(), NOW)
    unordered = dataclasses.replace(pattern(2), order=(), unordered=True)
    store.apply([StreamWrite(key(), "default", [], [shapes(), unordered, pattern()])], NOW)
    store.close()
    engine = create_engine(url)
    with engine.connect() as connection:
        counts = connection.execute(
            text(
                "SELECT patterns.unordered, sites.kind, sites.module, sites.cause_op, calls, modules, payload_bytes"
                " FROM pattern_sites JOIN patterns ON patterns.hash = pattern_sites.pattern_hash"
                " JOIN sites ON sites.hash = pattern_sites.site_hash"
                " LEFT JOIN shapes ON shapes.pattern_hash = patterns.hash"
                " LEFT JOIN shape_sites ON shapes_hash = shapes.hash AND shape_sites.site_hash = sites.hash"
                " ORDER BY unordered, kind"
            )
        ).all()
    engine.dispose()
    # Order (0, 1, 2, 0): three gathers of two layers with 64 bytes each, one reduce_scatter of 32.
    assert [tuple(row) for row in counts] == [
        (0, "all_gather", "layers.*.wo", None, 3, 2, 192),
        (0, "reduce_scatter", "layers.*.wo", "aten.mm.default", 1, 1, 32),
        (1, "all_gather", "layers.*.wo", None, None, 2, None),
        (1, "reduce_scatter", "layers.*.wo", "aten.mm.default", None, 1, None),
    ]


def test_bodies_are_small_and_come_back() -> None:
    long = dataclasses.replace(pattern(), order=(0, 1, 2, 0) * 5_000)
    body = codec.encode(long)
    assert codec.decode_pattern(long.hash, body) == long
    assert len(body) < 500
    assert codec.decode_shapes(shapes().hash, shapes().pattern_hash, codec.encode(shapes())) == shapes()
    assert codec.decode_lines(lines().hash, lines().pattern_hash, codec.encode(lines())) == lines()
    assert codec.decode_modules(modules().hash, codec.encode(modules())) == modules()
    statistics = (BytesStatistics(0, 1, 2, 3, 2**63 - 1),)
    assert codec.decode_statistics(codec.encode_statistics(statistics)) == statistics
    assert codec.encode_statistics(()) is None


def test_ids_sort_by_time_and_are_version_seven() -> None:
    ids = [uuid7(NOW + step * 1_000_000) for step in range(5)]
    assert ids == sorted(ids)
    parsed = uuid.UUID(ids[0])
    assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
    assert parsed.int >> 80 == NOW // 1_000_000
    assert uuid7(NOW) != uuid7(NOW)
