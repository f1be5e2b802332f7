"""Numbers that are exact or withheld."""

from __future__ import annotations

from fractions import Fraction

from commwatch.service.domain.steady import Reason
from commwatch.service.domain.steady_run import Payload
from commwatch.service.domain.wording import payload_in_words

VERSION = 1
"""Of every form. It changes only when a field is removed or changes its meaning."""

Form = dict[str, object]


def fraction_to_json(value: Fraction | None) -> Form | None:
    """Numerator and denominator, in lowest terms."""
    return None if value is None else {"numerator": value.numerator, "denominator": value.denominator}


def bytes_to_json(payload: Payload) -> Form:
    """``bytes`` where every step has them exactly, ``mean`` where they vary; neither when withheld."""
    return {
        "bytes": payload.exact,
        "mean": fraction_to_json(payload.per_step) if payload.varies else None,
        "reason": payload.reason or None,
        "text": payload_in_words(payload),
    }


def reason_to_json(reason: Reason) -> Form:
    """Why there is no number or no verdict."""
    return {"code": reason.code, "message": reason.message}
