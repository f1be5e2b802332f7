"""``commwatch capture``: the list of ranks."""

from __future__ import annotations

import click
import pytest

from commwatch.service.cli.capture import _parse_ranks, capture

CONTEXT = click.Context(capture)
OPTION = next(option for option in capture.params if option.name == "ranks")


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", [0]),
        ("7,0", [0, 7]),
        ("0-3, 8,2", [0, 1, 2, 3, 8]),
        ("5-5", [5]),
        ("0-63", list(range(64))),
        ("99999999999999999999", [99999999999999999999]),
    ],
)
def test_ranks_are_read(text: str, ranks: list[int]) -> None:
    assert _parse_ranks(CONTEXT, OPTION, text) == ranks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no list of ranks such as 0,7 or 0-3."),
        ("a", "'a' is no list of ranks such as 0,7 or 0-3."),
        ("0,,1", "'0,,1' is no list of ranks such as 0,7 or 0-3."),
        ("-1", "'-1' is no list of ranks such as 0,7 or 0-3."),
        ("1-", "'1-' is no list of ranks such as 0,7 or 0-3."),
        ("3-1", "3-1 goes down: write it the other way round."),
        ("0-64", "'0-64' are more than 64 ranks."),
        ("0-63,64", "'0-63,64' are more than 64 ranks."),
        ("0-99999999999999999999", "'0-99999999999999999999' are more than 64 ranks."),
    ],
)
def test_what_is_no_list_of_ranks_is_refused(text: str, message: str) -> None:
    with pytest.raises(click.BadParameter) as refused:
        _parse_ranks(CONTEXT, OPTION, text)
    assert refused.value.message == message
