"""Numbers and alerts in words, and what identifies an alert."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

import pytest

from commwatch.service.domain.alerting import alerts_of, fingerprint
from commwatch.service.domain.changes import Comparison
from commwatch.service.domain.compare import compare
from commwatch.service.domain.policy import judge
from commwatch.service.domain.records import Line
from commwatch.service.domain.steady_run import Payload
from commwatch.service.domain.wording import bytes_in_words, payload_in_words
from tests.unit.service.domain.jobs import IMPLICIT, NOW, Calls, Job, layers, run_id

GATHER = Calls("all_gather", "layers.*.wo", 2, payload=1024, cause=IMPLICIT, line=Line("model.py", 88, "forward"))


def compared(base: Job, head: Job) -> Comparison:
    found = compare(base.steady(), head.steady())
    assert isinstance(found, Comparison)
    return found


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1060, "1.1 kB"),
        (99_949, "99.9 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (12_345_678, "12.3 MB"),
        (2_100_000_000, "2.1 GB"),
        (-32_768, "-32.8 kB"),
        (Fraction(3, 2), "2 B"),
        (10**19, "10000 PB"),
    ],
)
def test_bytes_in_decimal_units(count: int | Fraction, text: str) -> None:
    assert bytes_in_words(count) == text


def test_payload_that_varies_or_is_withheld_is_marked() -> None:
    assert payload_in_words(Payload(Fraction(1500), varies=True)) == "~1.5 kB"
    assert payload_in_words(Payload(None, reason="x")) == "unknown"


def test_alert_is_one_for_all_layers_and_ranks() -> None:
    found = compared(Job(1), Job(2, layers(80, GATHER), world_size=4))
    (alert,) = alerts_of(found, judge(found), NOW, new_id=lambda: "id")
    assert (alert.title, alert.state, alert.run_id, alert.base_run_id, alert.opened_unix_ns) == (
        (
            "+2 all_gather per layer (x80) in layers.*.wo, forward: "
            "implicit redistribute S(0) -> R asked by aten.mm.default at model.py:88"
        ),
        "open",
        run_id(2),
        run_id(1),
        NOW,
    )
    assert alert.change["delta_calls"] == 640
    assert alert.change["severity"] == "alert"


def test_fingerprint_is_over_site_kind_of_change_and_group_alone() -> None:
    (first,) = compared(Job(1), Job(2, layers(4, GATHER))).changes
    moved = replace(GATHER, times=7, payload=9, line=Line("other.py", 1, "f"))
    (same,) = compared(Job(3), Job(4, layers(9, moved), world_size=4, commit=9)).changes
    assert fingerprint(first) == fingerprint(same)
    assert re.fullmatch(r"v1:[0-9a-f]{32}", fingerprint(first))
    (other,) = compared(Job(1), Job(2, layers(4, replace(GATHER, phase="backward")))).changes
    (removed,) = compared(Job(2, layers(4, GATHER)), Job(1)).changes
    assert len({fingerprint(change) for change in (first, other, removed)}) == 3


def test_growing_payload_opens_one_alert_of_its_own() -> None:
    small = layers(4, Calls("all_reduce", "layers.*.wo", 1, 1000), Calls("all_reduce", "embed", 1, 1000))
    large = layers(4, Calls("all_reduce", "layers.*.wo", 1, 2000), Calls("all_reduce", "embed", 1, 2000))
    found = compared(Job(1, small), Job(2, large))
    (alert,) = alerts_of(found, judge(found), NOW)
    assert alert.fingerprint == "v1:payload"
    assert alert.title == "+32 kB payload per step (+100 %): 32 kB -> 64 kB over all ranks"
