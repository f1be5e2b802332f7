"""A client of the service's HTTP API. ``Client`` and its errors are all there is; forms are in
``client.forms`` and ``client.capture_forms``.
"""

from commwatch.client.errors import ClientError, NotFoundError, RefusedError, UnreachableError
from commwatch.client.http import DEFAULT_URL, Client, default_url

__all__ = ["DEFAULT_URL", "Client", "ClientError", "NotFoundError", "RefusedError", "UnreachableError", "default_url"]
