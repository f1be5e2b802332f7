"""Whether the process lives, and whether it can answer."""

from __future__ import annotations

from fastapi import APIRouter

from commwatch.service.store.contract import Store


def router(store: Store) -> APIRouter:
    """``/healthz`` answers as long as the process does; ``/readyz`` asks the database, and is 503 when it is down."""
    routes = APIRouter()

    @routes.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @routes.get("/readyz")
    def readyz() -> dict[str, str]:
        store.runs(limit=1)
        return {"status": "ready"}

    return routes
