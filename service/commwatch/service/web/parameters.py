"""Parameters that several routes take."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

Name = Annotated[str, Query(min_length=1, max_length=255)]
OptionalName = Annotated[str | None, Query(min_length=1, max_length=255)]
