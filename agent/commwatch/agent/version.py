"""The installed version."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version


def version() -> str:
    """Version of the distribution, such as ``0.1.0``; ``unknown`` when it runs from a bare folder."""
    try:
        return _version("commwatch")
    except PackageNotFoundError:
        return "unknown"
