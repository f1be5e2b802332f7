"""Which definitions are stored, and whether what refers to them fits. A bounded cache in front of the store."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass

from commwatch.service.domain.records import Definition, Facts, Frame, Lines, Modules, Pattern, Shapes, StepRange
from commwatch.service.ingest.checks import require
from commwatch.service.store.contract import Store


@dataclass(frozen=True, slots=True)
class Outline:
    """What must be known of a stored definition to check what refers to it."""

    kind: type
    pattern_hash: str | None = None
    calls: int = 0
    positions: int = 0
    unordered: bool = False


def outline_of(definition: Definition) -> Outline:
    """The outline of a body."""
    if isinstance(definition, Pattern):
        unordered = definition.unordered
        return Outline(Pattern, None, len(definition.calls), len(definition.order), unordered)
    if isinstance(definition, Shapes):
        return Outline(Shapes, definition.pattern_hash, 0, len(definition.order))
    if isinstance(definition, Lines):
        return Outline(Lines, definition.pattern_hash, len(definition.calls))
    return Outline(Modules)


class KnownDefinitions:
    """Outlines by (project, hash): the ``limit`` used last, the rest read from the store."""

    def __init__(self, store: Store, readers: Executor, limit: int) -> None:
        self._store = store
        self._readers = readers
        self._limit = limit
        self._outlines: OrderedDict[tuple[str, str], Outline] = OrderedDict()

    async def lookup(self, project: str, hashes: Collection[str]) -> dict[str, Outline]:
        """Outlines of those that are stored. Raises StoreUnavailableError."""
        found: dict[str, Outline] = {}
        missing: list[str] = []
        for hash_ in hashes:
            outline = self._outlines.get((project, hash_))
            if outline is None:
                missing.append(hash_)
            else:
                self._outlines.move_to_end((project, hash_))
                found[hash_] = outline
        if missing:
            loop = asyncio.get_running_loop()
            bodies = await loop.run_in_executor(self._readers, self._store.definitions, project, missing)
            self.remember(project, bodies.values())
            found |= {hash_: outline_of(body) for hash_, body in bodies.items()}
        return found

    def remember(self, project: str, definitions: Iterable[Definition]) -> None:
        """Note that they are stored."""
        for definition in definitions:
            self._outlines[project, definition.hash] = outline_of(definition)
            self._outlines.move_to_end((project, definition.hash))
        while len(self._outlines) > self._limit:
            self._outlines.popitem(last=False)


def references(frame: Frame) -> list[str]:
    """Hashes a frame refers to, the pattern first: what follows a pattern can be stored only after it."""
    content = frame.content
    hashes: list[str | None] = []
    if isinstance(content, StepRange):
        hashes = [content.pattern_hash, content.shapes_hash, content.lines_hash]
    elif isinstance(content, Facts):
        hashes = [content.modules_hash]
    return [hash_ for hash_ in hashes if hash_ is not None]


def check_frame(frame: Frame, outlines: dict[str, Outline]) -> None:
    """Whether a frame fits what it refers to. Raises MalformedError. All its references are in ``outlines``."""
    content = frame.content
    if isinstance(content, Facts) and content.modules_hash is not None:
        require(outlines[content.modules_hash].kind is Modules, f"{content.modules_hash} is not a Modules")
    if not isinstance(content, StepRange):
        return
    pattern = outlines[content.pattern_hash]
    require(pattern.kind is Pattern, f"{content.pattern_hash} is not a Pattern")
    for hash_, kind in ((content.shapes_hash, Shapes), (content.lines_hash, Lines)):
        if hash_ is not None:
            fits = outlines[hash_].kind is kind and outlines[hash_].pattern_hash == content.pattern_hash
            require(fits, f"{hash_} is not the {kind.__name__} of pattern {content.pattern_hash}")
    require(
        all(item.call < pattern.calls for item in content.statistics),
        f"statistics refer to a call beyond the {pattern.calls} of pattern {content.pattern_hash}",
    )


def check_follower(definition: Shapes | Lines, pattern: Outline) -> None:
    """Whether Shapes or Lines fit their pattern. Raises MalformedError."""
    require(pattern.kind is Pattern, f"{definition.pattern_hash} is not a Pattern")
    if isinstance(definition, Lines):
        length, expected = len(definition.calls), pattern.calls
    else:
        length, expected = len(definition.order), pattern.positions
    require(
        length == expected,
        f"{type(definition).__name__} {definition.hash} has {length} elements, its pattern {expected}",
    )
