"""The HTTP application."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import FastAPI

from commwatch.service.store.contract import Store
from commwatch.service.web import api, errors, health


def create_app(store: Store, clock: Callable[[], int] = time.time_ns) -> FastAPI:
    """The application over a store, which the caller closes. ``clock`` counts Unix nanoseconds.

    Handlers are plain functions: they run on the framework's threads, and a slow read never stops the streams of ranks.
    """
    # The interactive pages load scripts from elsewhere; the schema alone works without a network.
    app = FastAPI(title="commwatch", docs_url=None, redoc_url=None, openapi_url="/api/v1/openapi.json")
    errors.install(app)
    app.include_router(health.router(store))
    app.include_router(api.router(store, clock))
    return app
