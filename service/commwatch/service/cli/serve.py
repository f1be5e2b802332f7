"""``commwatch serve``: the service in one process."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

import click
from platformdirs import user_data_dir
from pydantic import ValidationError

from commwatch.service.app import Ready
from commwatch.service.app import serve as serve_app
from commwatch.service.listening import Address, AddressError, PortError
from commwatch.service.settings import Settings
from commwatch.service.store.contract import Store, StoreError
from commwatch.service.store.opening import database_url, open_store, shown_url

EXIT_INFRASTRUCTURE = 4


@click.command()
@click.option("--db", metavar="PATH|URL", help="Database. Default: commwatch.db in your data directory.")
@click.option("--grpc-listen", metavar="HOST:PORT", help="Where agents report. Default: 127.0.0.1:8431.")
@click.option("--http-listen", metavar="HOST:PORT", help="Where people ask. Default: 127.0.0.1:8430.")
@click.option("--insecure", is_flag=True, help="Allow addresses that other machines can reach: nothing is encrypted.")
def serve(db: str | None, grpc_listen: str | None, http_listen: str | None, insecure: bool) -> None:
    """Take what ranks report, and answer questions about it.

    Without options everything stays on this machine: a SQLite file in your data directory, both servers on loopback.
    """
    given = {"db": db, "grpc_listen": grpc_listen, "http_listen": http_listen, "insecure": insecure or None}
    settings = _settings({name: value for name, value in given.items() if value is not None})
    logging.basicConfig(
        level=settings.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    for chatty in ("alembic", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    url = database_url(settings.db or str(Path(user_data_dir("commwatch", appauthor=False)) / "commwatch.db"))
    try:
        store = open_store(url, migrate=True)
        try:
            asyncio.run(_serve(store, settings, url))
        finally:
            store.close()
    except (StoreError, PortError) as error:
        click.echo(f"commwatch serve: {error}", err=True)
        sys.exit(EXIT_INFRASTRUCTURE)


def _settings(given: dict[str, object]) -> Settings:
    """Environment and options. Raises click.UsageError."""
    try:
        settings = Settings(**given)  # type: ignore[arg-type]  # validated by it
        for listen in (settings.grpc_listen, settings.http_listen):
            address = Address.parse(listen)
            if not address.loopback and not settings.insecure:
                raise click.UsageError(
                    f"{address} can be reached by other machines, and nothing is encrypted yet. "
                    "Add --insecure if that is wanted."
                )
    except AddressError as error:
        raise click.UsageError(str(error)) from None
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(map(str, first["loc"]))
        raise click.UsageError(f"COMMWATCH_{name.upper()} is {first['input']!r}: {first['msg']}.") from None
    return settings


async def _serve(store: Store, settings: Settings, url: str) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def end() -> None:
        stop.set()
        # A second signal ends the process at once.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    def ready(where: Ready) -> None:
        click.echo(f"commwatch ready: http {where.http_url}  grpc {where.grpc_address}  db {shown_url(url)}")
        sys.stdout.flush()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    await serve_app(store, settings, ready=ready, stop=stop)
