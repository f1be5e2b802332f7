"""Content-addressed bodies: stored once per project, with the counts per site that SQL joins on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, Table, select

from commwatch.service.domain.records import Definition, Lines, Modules, Pattern, Shapes
from commwatch.service.domain.sites import Site, site_of
from commwatch.service.store import codec
from commwatch.service.store.database import Database, chunks, insert_sql
from commwatch.service.store.schema import lines, modules, pattern_sites, patterns, shape_sites, shapes, sites

_INSERT_PATTERN = insert_sql(patterns)
_INSERT_SITE = insert_sql(sites)
_INSERT_PATTERN_SITE = insert_sql(pattern_sites)
_INSERT_SHAPES = insert_sql(shapes)
_INSERT_SHAPE_SITE = insert_sql(shape_sites)
_INSERT_LINES = insert_sql(lines)
_INSERT_MODULES = insert_sql(modules)


def write_definitions(
    database: Database, connection: Connection, project_id: str, definitions: Iterable[Definition]
) -> None:
    """Store those that are new. Raises ValueError when Shapes or Lines name a pattern that is not known."""
    given = {definition.hash: definition for definition in definitions}
    stored = set(_stored(connection, project_id, given))
    new = [definition for hash_, definition in given.items() if hash_ not in stored]
    for definition in new:
        if isinstance(definition, Pattern):
            _write_pattern(database, connection, project_id, definition)
        elif isinstance(definition, Modules):
            database.many(connection, _INSERT_MODULES, [(project_id, definition.hash, codec.encode(definition))])
    followers = [definition for definition in new if isinstance(definition, (Shapes, Lines))]
    known = {hash_: definition for hash_, definition in given.items() if isinstance(definition, Pattern)}
    missing = {follower.pattern_hash for follower in followers} - set(known)
    known |= _read_patterns(connection, project_id, missing)
    for follower in followers:
        pattern = known.get(follower.pattern_hash)
        if pattern is None:
            raise ValueError(f"{follower.hash} follows pattern {follower.pattern_hash}, which is not stored.")
        row = (project_id, follower.hash, follower.pattern_hash, codec.encode(follower))
        if isinstance(follower, Lines):
            database.many(connection, _INSERT_LINES, [row])
        else:
            database.many(connection, _INSERT_SHAPES, [row])
            sums = [
                (project_id, follower.hash, site, sum_) for site, sum_ in payload_by_site(pattern, follower).items()
            ]
            database.many(connection, _INSERT_SHAPE_SITE, sums)


def read_definitions(connection: Connection, project_id: str, hashes: Collection[str]) -> dict[str, Definition]:
    """The bodies that are stored, by hash."""
    found: dict[str, Definition] = dict(_read_patterns(connection, project_id, hashes))
    for hash_, pattern_hash, body in _select(connection, shapes, project_id, hashes, "pattern_hash", "body"):
        found[hash_] = codec.decode_shapes(hash_, pattern_hash, body)
    for hash_, pattern_hash, body in _select(connection, lines, project_id, hashes, "pattern_hash", "body"):
        found[hash_] = codec.decode_lines(hash_, pattern_hash, body)
    for hash_, body in _select(connection, modules, project_id, hashes, "body"):
        found[hash_] = codec.decode_modules(hash_, body)
    return found


def payload_by_site(pattern: Pattern, sizes: Shapes) -> dict[str, int]:
    """Payload bytes of one step by site hash."""
    site_hashes = [site_of(call).hash for call in pattern.calls]
    payload: dict[str, int] = {}
    for (call, shape), times in Counter(zip(pattern.order, sizes.order, strict=True)).items():
        payload[site_hashes[call]] = payload.get(site_hashes[call], 0) + times * sizes.shapes[shape].payload_bytes
    return payload


def _write_pattern(database: Database, connection: Connection, project_id: str, pattern: Pattern) -> None:
    times = Counter(pattern.order)
    counted: dict[Site, tuple[int, set[str]]] = {}
    for index, call in enumerate(pattern.calls):
        calls, names = counted.setdefault(site := site_of(call), (0, set()))
        names.add(call.module)
        counted[site] = (calls + times[index], names)
    hashes = {site: site.hash for site in counted}
    row = (project_id, pattern.hash, pattern.unordered, codec.encode(pattern))
    database.many(connection, _INSERT_PATTERN, [row])
    database.many(connection, _INSERT_SITE, [_site_row(project_id, hash_, site) for site, hash_ in hashes.items()])
    counts = [
        (project_id, pattern.hash, hashes[site], None if pattern.unordered else calls, len(names))
        for site, (calls, names) in counted.items()
    ]
    database.many(connection, _INSERT_PATTERN_SITE, counts)


def _site_row(project_id: str, hash_: str, site: Site) -> tuple[object, ...]:
    cause = site.cause
    described = (None,) * 4 if cause is None else (cause.src, cause.dst, cause.implicit, cause.op)
    group = site.group
    where = (site.phase, site.kind, group.name, group.size, group.stride, site.module)
    return (project_id, hash_, *where, *described, site.dtype)


def _read_patterns(connection: Connection, project_id: str, hashes: Collection[str]) -> dict[str, Pattern]:
    rows = _select(connection, patterns, project_id, hashes, "body")
    return {hash_: codec.decode_pattern(hash_, body) for hash_, body in rows}


def _stored(connection: Connection, project_id: str, hashes: Mapping[str, Definition]) -> Iterable[str]:
    for table in (patterns, shapes, lines, modules):
        for (hash_,) in _select(connection, table, project_id, list(hashes)):
            yield hash_


def _select(
    connection: Connection, table: Table, project_id: str, hashes: Collection[str], *columns: str
) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for some in chunks(list(hashes)):
        statement = select(table.c.hash, *(table.c[name] for name in columns)).where(
            table.c.project_id == project_id, table.c.hash.in_(some)
        )
        rows.extend(tuple(row) for row in connection.execute(statement))
    return rows
