"""What can go wrong.

ClientError
 + UnreachableError   no answer, or one that says that the service cannot answer now
 + NotFoundError      no run, commit or branch has that name
 + RefusedError       the request was wrong: ambiguous name, a value out of its limits
"""

from __future__ import annotations

from collections.abc import Sequence


class ClientError(Exception):
    """Root of the client's errors. ``str()`` says what happened and what to do next."""


class UnreachableError(ClientError):
    """The service did not answer, or not in a way this client understands."""


class _AnsweredError(ClientError):
    """An error the service answered with."""

    def __init__(self, code: str, message: str, matches: Sequence[str] = (), ref: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.matches = list(matches)
        self.ref = ref


class RefusedError(_AnsweredError):
    """The service refused the request. ``code`` is stable; ``matches`` are what to name instead of ``ref``."""


class NotFoundError(_AnsweredError):
    """Nothing has that name. ``matches`` are the nearest names.

    ``code`` is ``unknown_ref``, ``no_run``, ``unknown_site`` or ``unknown_capture``.
    """
