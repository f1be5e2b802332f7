"""Errors as JSON: ``{"error": {"code", "message", "matches", "ref"}}``."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from commwatch.service import verdicts
from commwatch.service.store.contract import StoreUnavailableError


def install(app: FastAPI) -> None:
    """Answer every error in the one form."""
    app.add_exception_handler(verdicts.RefError, _ref_error)
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
    if isinstance(error, verdicts.AmbiguousRefError):
        return error_response(422, "ambiguous_ref", error.message, error.matches, error.ref)
    code = "no_run" if isinstance(error, verdicts.NoRunError) else "unknown_ref"
    return error_response(404, code, error.message, error.matches, error.ref)


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
