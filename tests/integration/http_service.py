"""The real HTTP application over a real store, on a free port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from commwatch.service.store.contract import Store
from commwatch.service.web import create_app

DEADLINE_S = 20.0


@contextmanager
def serving(store: Store) -> Iterator[str]:
    """Serve until the block ends; gives the URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = uvicorn.Server(uvicorn.Config(create_app(store), log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + DEADLINE_S
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < deadline
            thread.join(0.005)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
