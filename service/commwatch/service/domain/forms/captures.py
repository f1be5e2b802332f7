"""Captures and the requests for them, to JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commwatch.service.domain.captures import (
    CapturedCall,
    CapturedCollective,
    CapturedRecord,
    CapturedRedistribute,
    CapturedStep,
    CapturedTensor,
    CapturedValue,
    CaptureRequest,
    CaptureSummary,
)
from commwatch.service.domain.forms.numbers import Form
from commwatch.service.domain.forms.runs import group_to_json, lines_to_json
from commwatch.service.domain.records import Group, Line

_SUMMARY = (
    "rank",
    "step",
    "parts",
    "whole",
    "request",
    "records",
    "collectives",
    "dropped_records",
    "reason",
    "stored_unix_ns",
)
_REDISTRIBUTE = ("argument", "src", "dst", "trace", "implicit")
_RECORD = ("depth", "call", "line", "position")


def summary_to_json(summary: CaptureSummary) -> Form:
    """What is stored of one step of one rank."""
    return {**{name: getattr(summary, name) for name in _SUMMARY}, "request": summary.request or None}


def request_to_json(request: CaptureRequest) -> Form:
    """What one rank was asked for, and what became of it."""
    names = ("number", "attempt", "rank", "steps", "asked_by", "asked_unix_ns", "state", "reason")
    return {**{name: getattr(request, name) for name in names}, "captured_steps": list(request.captured_steps)}


def captured_step_to_json(captured: CapturedStep) -> Form:
    """One captured step: distinct calls and lines, and the records that point at them."""
    return {
        "capture": summary_to_json(captured.summary),
        "calls": [_call_to_json(call) for call in captured.calls],
        "lines": lines_to_json(captured.lines),
        "records": [
            {**{name: getattr(record, name) for name in _RECORD}, "output_hash": record.output_hash or None}
            for record in captured.records
        ],
    }


def captured_step_from_json(form: Mapping[str, Any]) -> CapturedStep:
    """What ``captured_step_to_json`` made; fields that a newer service added are ignored."""
    summary = {name: form["capture"][name] for name in _SUMMARY}
    return CapturedStep(
        summary=CaptureSummary(**{**summary, "request": summary["request"] or 0}),
        calls=tuple(_call_from_json(call) for call in form["calls"]),
        lines=tuple(Line(line["file"], line["line"], line["function"]) for line in form["lines"]),
        records=tuple(
            CapturedRecord(**{name: record[name] for name in _RECORD}, output_hash=record["output_hash"] or "")
            for record in form["records"]
        ),
    )


def _call_to_json(call: CapturedCall) -> Form:
    redistribute = call.redistribute
    return {
        "kind": call.kind,
        "name": call.name,
        "arguments": [_value_to_json(value) for value in call.arguments],
        "outputs": [_value_to_json(value) for value in call.outputs],
        "redistribute": redistribute and {name: getattr(redistribute, name) for name in _REDISTRIBUTE},
        "collectives": [
            {"kind": item.kind, "group": group_to_json(item.group), "phase": item.phase, "module": item.module}
            for item in call.collectives
        ],
    }


def _value_to_json(value: CapturedValue) -> Form:
    held = value.value
    if isinstance(held, CapturedTensor):
        tensor = {
            "type": held.type,
            "dtype": held.dtype,
            "shape": list(held.shape),
            "placements": held.placements,
            "mesh": list(held.mesh),
            "id": held.id or None,
        }
        return {"name": value.name, "tensor": tensor}
    if isinstance(held, str):
        return {"name": value.name, "text": held}
    return {"name": value.name, "list": [_value_to_json(item) for item in held]}


def _call_from_json(form: Mapping[str, Any]) -> CapturedCall:
    redistribute = form["redistribute"]
    return CapturedCall(
        kind=form["kind"],
        name=form["name"],
        arguments=tuple(_value_from_json(value) for value in form["arguments"]),
        outputs=tuple(_value_from_json(value) for value in form["outputs"]),
        redistribute=redistribute and CapturedRedistribute(**{name: redistribute[name] for name in _REDISTRIBUTE}),
        collectives=tuple(
            CapturedCollective(item["kind"], _group_from_json(item["group"]), item["phase"], item["module"])
            for item in form["collectives"]
        ),
    )


def _value_from_json(form: Mapping[str, Any]) -> CapturedValue:
    if "tensor" in form:
        tensor = form["tensor"]
        shape, mesh = tuple(tensor["shape"]), tuple(tensor["mesh"])
        held = CapturedTensor(tensor["type"], tensor["dtype"], shape, tensor["placements"], mesh, tensor["id"] or 0)
        return CapturedValue(form["name"], held)
    if "list" in form:
        return CapturedValue(form["name"], tuple(_value_from_json(item) for item in form["list"]))
    return CapturedValue(form["name"], form["text"])


def _group_from_json(form: Mapping[str, Any]) -> Group:
    return Group(form["name"], form["size"], form["stride"])
