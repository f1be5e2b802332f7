"""Changes between two runs."""

from __future__ import annotations

from commwatch.service.domain.changes import Change
from commwatch.service.domain.forms.numbers import Form, bytes_to_json, fraction_to_json
from commwatch.service.domain.forms.runs import lines_to_json, site_to_json
from commwatch.service.domain.policy import JudgedChange, PayloadGrowth
from commwatch.service.domain.wording import effect, payload_sentence, sentence


def change_to_json(judged: JudgedChange) -> Form:
    """One change with its severity."""
    return {"severity": judged.severity, **scaled_to_json(judged.change)}


def scaled_to_json(change: Change) -> Form:
    """One site that differs, without a severity."""
    return {
        "change": change.change,
        "sentence": sentence(change),
        "effect": effect(change),
        **site_to_json(change.site),
        "base_calls": change.base_calls,
        "head_calls": change.head_calls,
        "delta_calls": change.delta_calls,
        "delta_per_rank": change.delta_per_rank,
        "delta_per_layer": change.delta_per_layer,
        "layers": change.layers,
        "ranks": change.ranks,
        "of_ranks": change.of_ranks,
        "base_payload": bytes_to_json(change.base_payload),
        "head_payload": bytes_to_json(change.head_payload),
        "delta_bytes": change.delta_bytes,
        "base_modules": change.base_modules,
        "head_modules": change.head_modules,
        "base_instances": change.base_instances,
        "head_instances": change.head_instances,
        "lines": lines_to_json(change.lines),
    }


def payload_to_json(growth: PayloadGrowth) -> Form:
    """Payload of a whole step in both runs."""
    return {
        "severity": growth.severity,
        "sentence": payload_sentence(growth),
        "base": bytes_to_json(growth.base),
        "head": bytes_to_json(growth.head),
        "unexplained": fraction_to_json(growth.unexplained),
    }
