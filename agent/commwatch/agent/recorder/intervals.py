"""Which module an autograd node came from, by the number it got when it was made."""

from __future__ import annotations

from bisect import bisect_right
from threading import get_ident

from commwatch.agent.recorder.torch_private import current_autograd_node, sequence_number


class _Notes:
    """What one thread noted: from this number on that module was active. ``tags`` are single nodes.

    Another thread may read while this one writes: a note is one object in one list.
    """

    __slots__ = ("mark", "notes", "old_tags", "tags")

    def __init__(self) -> None:
        self.notes: list[tuple[int, str]] = []
        self.mark = 0
        self.tags: dict[int, str] = {}
        self.old_tags: dict[int, str] = {}

    def halve(self) -> None:
        half = len(self.notes) // 2
        del self.notes[:half]
        self.mark = max(0, self.mark - half)

    def step(self) -> bool:
        """Forget what the step before noted. True when nothing is left."""
        del self.notes[: self.mark]
        self.mark = len(self.notes)
        self.old_tags, self.tags = self.tags, {}
        return not self.notes and not self.old_tags

    def module_of(self, number: int) -> str | None:
        """The module that made this node; empty for none, None when this thread cannot have made it in a module."""
        tagged = self.tags.get(number) or self.old_tags.get(number)
        if tagged is not None:
            return tagged
        notes = self.notes
        position = bisect_right(notes, number, key=_number)
        if not position:
            return None
        _, module = notes[position - 1]
        return None if not module and position == len(notes) else module


def _number(note: tuple[int, str]) -> int:
    return note[0]


class Intervals:
    """For each autograd node of the last steps, the module whose forward made it.

    Numbers grow with every node a thread makes, each thread having its own. Each start and end of a module's forward
    notes the number and the module that is active from there on; a node belongs to the last note at or before it.
    What is made while a backward runs (recomputation, which a backward inside the backward then differentiates) is
    noted apart: a number alone does not say which of the two graphs, or which thread's, a node belongs to.
    """

    LIMIT = 200_000
    """Notes kept for one thread; beyond it the older half is dropped, and nodes older than that have no module."""

    THREADS = 64
    """Threads followed at once; modules called on further ones are not known in backward."""

    __slots__ = ("_forward", "_recomputed")

    def __init__(self) -> None:
        self._forward: dict[int, _Notes] = {}
        self._recomputed: dict[int, _Notes] = {}

    def _mine(self) -> _Notes | None:
        table = self._forward if current_autograd_node() is None else self._recomputed
        thread = get_ident()
        notes = table.get(thread)
        if notes is None and len(table) < self.THREADS:
            notes = table[thread] = _Notes()
        return notes

    def tag(self, number: int, module: str) -> None:
        """This one node belongs to ``module``, whatever the notes say: its forward was seen on the frames."""
        notes = self._mine()
        if notes is not None and len(notes.tags) < self.LIMIT:
            notes.tags[number] = module

    def note(self, module: str) -> None:
        """From here on this module is active on this thread; empty for none."""
        notes = self._mine()
        if notes is None:
            return
        notes.notes.append((sequence_number(), module))
        if len(notes.notes) > self.LIMIT:
            notes.halve()

    def recomputed(self) -> bool:
        """Whether this thread called modules inside a backward: a node may then be of either graph."""
        return get_ident() in self._recomputed

    def module_of(self, number: int, *, nested: bool = False) -> str:
        """Module of the node with this number; empty when it is not known for certain.

        ``nested``: the node runs in a backward inside the backward, on a graph that this thread recomputed.
        """
        if nested:
            notes = self._recomputed.get(get_ident())
            return (notes.module_of(number) or "") if notes is not None else ""
        found = {notes.module_of(number) for notes in list(self._forward.values())} - {None}
        return (found.pop() or "") if len(found) == 1 else ""

    def step(self) -> None:
        """A step ended: forget what the step before it noted."""
        for table in (self._forward, self._recomputed):
            for thread, notes in list(table.items()):
                if notes.step():
                    del table[thread]
