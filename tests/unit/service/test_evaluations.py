from __future__ import annotations

import asyncio

import pytest

from commwatch.service import evaluations
from commwatch.service.evaluations import Evaluations


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_changed_run_is_evaluated_at_most_once_a_second_and_after_its_last_change() -> None:
    async def main() -> None:
        clock = Clock()
        queue = Evaluations(lambda _run_id: None, every_s=1.0, clock=clock)
        queue.run_changed("a")
        assert queue.take_due() == ["a"]
        queue.run_changed("a")
        queue.run_changed("a")
        queue.run_changed("b")
        assert queue.take_due() == ["b"]
        clock.now += 0.9
        assert queue.take_due() == []
        clock.now += 0.1
        assert queue.take_due() == ["a"]
        clock.now += 60
        assert queue.take_due() == []

    asyncio.run(main())


def test_a_run_that_only_progresses_is_evaluated_ever_more_rarely() -> None:
    async def main() -> None:
        clock = Clock()
        queue = Evaluations(lambda _run_id: None, every_s=1.0, clock=clock)
        queue.run_changed("a")
        queue.take_due()
        taken = []
        for second in range(1, 150):
            clock.now += 1
            queue.run_progressed("a")
            if queue.take_due():
                taken.append(second)
        # One second after the evaluation comes the first progress: due 2, 4, 8, ... and then 60 s after the last.
        assert taken == [2, 6, 14, 30, 62, 122]
        queue.run_changed("a")
        clock.now += 1
        assert queue.take_due() == ["a"]

    asyncio.run(main())


def test_a_failing_evaluation_is_logged_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> list[str]:
        seen: list[str] = []
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def evaluate(run_id: str) -> None:
            seen.append(run_id)
            if run_id == "last":
                loop.call_soon_threadsafe(done.set)
            raise RuntimeError(run_id)

        queue = Evaluations(evaluate, every_s=0.01, clock=loop.time)
        work = asyncio.create_task(queue.run())
        for run_id in ("a", "b", "last"):
            queue.run_changed(run_id)
        await asyncio.wait_for(done.wait(), 20)
        assert not work.done()
        work.cancel()
        await asyncio.wait([work])
        return seen

    assert asyncio.run(main()) == ["a", "b", "last"]
    assert [record.getMessage() for record in caplog.records] == [
        f"evaluation failed run={run_id} error='{run_id}' repeated=0" for run_id in ("a", "b", "last")
    ]


def test_the_number_of_runs_is_bounded() -> None:
    async def main() -> None:
        queue = Evaluations(lambda _run_id: None, every_s=1.0, clock=Clock())
        for number in range(evaluations.MAX_RUNS + 5):
            queue.run_changed(str(number))
        due = queue.take_due()
        assert len(due) == evaluations.MAX_RUNS
        assert due[0] == "5"

    asyncio.run(main())
