from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from commwatch.agent.spool.page import CLEAN, EXCEPTION, RUNNING, Counters, Numbers, PageError, PageWriter, read_page


def test_a_new_page_says_nothing_has_happened(tmp_path: Path) -> None:
    PageWriter(tmp_path / "page")
    assert read_page(tmp_path / "page") == Counters(ending=RUNNING)


def test_counters_and_words_are_independent(tmp_path: Path) -> None:
    page = PageWriter(tmp_path / "page")
    for step in range(1, 6):
        page.publish(Numbers(1, step, step, step, 3 * step))
        assert read_page(tmp_path / "page") == Counters(1, step, step, step, 3 * step)
    page.end(RUNNING, "", "disk full")
    assert read_page(tmp_path / "page") == Counters(1, 5, 5, 5, 15, reason="disk full")
    for step in (6, 7):
        page.publish(Numbers(2**32, step, step, step, 2**63, 1, 2))
        assert read_page(tmp_path / "page") == Counters(2**32, step, step, step, 2**63, 1, 2, reason="disk full")
    page.end(CLEAN, "", "disk full")
    assert read_page(tmp_path / "page") == Counters(2**32, 7, 7, 7, 2**63, 1, 2, ending=CLEAN, reason="disk full")


@pytest.mark.parametrize(("text", "shown"), [("é" * 150, "é" * 100), ("x" + "é" * 150, "x" + "é" * 99), ("", "")])
def test_long_words_are_cut_between_characters(tmp_path: Path, text: str, shown: str) -> None:
    PageWriter(tmp_path / "page").end(EXCEPTION, text, text)
    found = read_page(tmp_path / "page")
    assert (found.ending, found.detail, found.reason) == (EXCEPTION, shown, shown)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"\0" * 4096])
def test_another_file_is_no_page(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "page").write_bytes(content)
    with pytest.raises(PageError):
        read_page(tmp_path / "page")


# Far faster than any step, but with a system call between two writes as every step has.
WRITE_FOR_EVER = (
    "import itertools, sys, time\nfrom pathlib import Path\n"
    "from commwatch.agent.spool.page import Numbers, PageWriter\n"
    "page = PageWriter(Path(sys.argv[1]))\nprint('ready', flush=True)\n"
    "for n in itertools.count(1):\n    page.publish(Numbers(n, n, n, n, n, n, n))\n    time.sleep(0.00002)\n"
)


def test_a_reader_never_sees_a_mixture_and_neither_does_sigkill_leave_one(tmp_path: Path) -> None:
    for attempt in range(3):
        path = tmp_path / str(attempt)
        writer = subprocess.Popen([sys.executable, "-c", WRITE_FOR_EVER, str(path)], stdout=subprocess.PIPE)
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            seen = [read_page(path) for _ in range(20_000)]
        finally:
            writer.kill()
            writer.communicate()
        for found in [*seen, read_page(path)]:
            numbers = (found.range_number, found.last_step, found.range_steps, found.steps, found.calls)
            assert len({*numbers, found.dropped_calls, found.dropped_steps}) == 1
        assert seen[-1].steps > seen[0].steps
