"""From a judgement to the alerts it opens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from uuid import uuid4

from commwatch.service.domain.alerts import Alert
from commwatch.service.domain.changes import Change, Comparison
from commwatch.service.domain.forms.comparisons import change_to_json, payload_to_json
from commwatch.service.domain.policy import Judgement
from commwatch.service.domain.wording import payload_sentence, sentence

PAYLOAD_FINGERPRINT = "v1:payload"
"""Fingerprint of the alert on a step's whole payload: a workload has at most one of them open."""


def fingerprint(change: Change) -> str:
    """``v1:`` and 32 hexadecimal characters over site, kind of change and group."""
    group = change.site.group
    content = json.dumps([change.site.hash, change.change, group.name, group.size, group.stride], separators=(",", ":"))
    return f"v1:{hashlib.blake2b(content.encode(), digest_size=16).hexdigest()}"


def alerts_of(
    comparison: Comparison,
    judgement: Judgement,
    now_unix_ns: int,
    new_id: Callable[[], str] = lambda: str(uuid4()),
) -> list[Alert]:
    """One alert for each change that alerts, and one for a payload that grew beyond what they explain."""
    found = [
        (fingerprint(judged.change), sentence(judged.change), change_to_json(judged))
        for judged in judgement.changes
        if judged.severity == "alert"
    ]
    if judgement.payload.severity == "alert":
        form = {"change": "payload", **payload_to_json(judgement.payload)}
        found.append((PAYLOAD_FINGERPRINT, payload_sentence(judgement.payload), form))
    head, base = comparison.head.run, comparison.base.run
    return [
        Alert(new_id(), mark, head.project, head.workload, "open", head.id, base.id, title, form, now_unix_ns)
        for mark, title, form in found
    ]
