"""Errors as JSON: ``{"error": {"code", "message", "matches", "ref"}}``."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from commwatch.service import verdicts
from commwatch.service.store.contract import RequestRefusedError, StoreUnavailableError

# The most special first.
_REF_ERRORS: tuple[tuple[type[verdicts.RefError], tuple[int, str]], ...] = (
    (verdicts.AmbiguousSiteError, (422, "ambiguous_site")),
    (verdicts.AmbiguousRefError, (422, "ambiguous_ref")),
    (verdicts.UnknownSiteError, (404, "unknown_site")),
    (verdicts.UnknownCaptureError, (404, "unknown_capture")),
    (verdicts.NoRunError, (404, "no_run")),
    (verdicts.RefError, (404, "unknown_ref")),
)


def install(app: FastAPI) -> None:
    """Answer every error in the one form."""
    app.add_exception_handler(verdicts.RefError, _ref_error)
    app.add_exception_handler(RequestRefusedError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(StoreUnavailableError, _unavailable)
    app.add_exception_handler(HTTPException, _http_error)


def error_response(
    status: int, code: str, message: str, matches: Sequence[str] = (), ref: str | None = None
) -> JSONResponse:
    """One error. ``ref`` is the name it is about."""
    return JSONResponse({"error": {"code": code, "message": message, "matches": list(matches), "ref": ref}}, status)


def _ref_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, verdicts.RefError)
    status, code = next(found for kind, found in _REF_ERRORS if isinstance(error, kind))
    return error_response(status, code, error.message, error.matches, error.ref)


def _refused(_request: Request, error: Exception) -> JSONResponse:
    return error_response(422, "capture_refused", str(error))


def _invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    parts = [f"{'.'.join(str(part) for part in found['loc'][1:])}: {found['msg']}" for found in error.errors()]
    return error_response(422, "invalid_request", "; ".join(parts))


def _unavailable(_request: Request, _error: Exception) -> JSONResponse:
    # The store's own message may name the database's host and user: clients get another one.
    return error_response(503, "store_unavailable", "The database cannot answer now; try again in a few seconds.")


def _http_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "error")
    return error_response(error.status_code, code, f"{error.detail}. The API is below /api/v1.")
