"""Text for people."""

from __future__ import annotations

import pytest

from commwatch.service.cli import printing

S = 1_000_000_000


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59, "59s"), (60, "1m"), (3599, "59m"), (3600, "1h"), (86_399, "23h"), (86_400, "1d"), (-5, "0s")],
)
def test_age(seconds: int, text: str) -> None:
    assert printing.age(1000 * S, (1000 + seconds) * S) == text


def test_columns_are_the_terminals_and_at_most_100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert printing.columns() == 80
    monkeypatch.setenv("COLUMNS", "250")
    assert printing.columns() == 100


def test_long_text_hangs_behind_its_label(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    printing.labelled("why", "one two three four five six seven", 8)
    assert capsys.readouterr().out == "why     one two three four\n        five six seven\n"
