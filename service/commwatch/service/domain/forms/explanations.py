"""Why a call is there, as JSON."""

from __future__ import annotations

from collections.abc import Iterable

from commwatch.service.domain.explaining import Link, TreePath
from commwatch.service.domain.forms.numbers import Form


def chain_to_json(links: Iterable[Link]) -> list[Form]:
    """Links from the user's line to the collective."""
    return [{"link": link.name, "text": link.text} for link in links]


def path_to_json(path: TreePath | None) -> Form | None:
    """Where a capture shows the first call of a site."""
    if path is None:
        return None
    records = [{"depth": depth, "text": text} for depth, text in path.records]
    return {"rank": path.rank, "step": path.step, "records": records}
