"""What every store must do with what ranks report."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from commwatch.service.domain.records import BytesStatistics, Commit, Definition, Frame, MeshDimension
from commwatch.service.domain.runs import Environment, RankRanges
from commwatch.service.store.contract import RejectedFrame, Store, StreamWrite
from commwatch.service.store.opening import open_store
from tests.contract.samples import (
    NOW,
    SECOND,
    call,
    facts,
    goodbye,
    hash_of,
    hello,
    key,
    lines,
    modules,
    pattern,
    progress,
    run_id,
    sha,
    shapes,
    step_range,
)

BODIES: list[Definition] = [pattern(), shapes(), lines(), modules()]


def first_write(run: int = 1, attempt: int = 0, rank: int = 0) -> StreamWrite:
    return StreamWrite(
        key(run, attempt, rank), "default", [Frame(1, facts()), Frame(2, step_range(1, 1, 10))], list(BODIES)
    )


def test_new_rank_starts_at_zero_and_resumes_after_its_last_frame(store: Store, url: str) -> None:
    assert store.open_stream(hello(), NOW) == 0
    store.apply([first_write()], NOW)
    assert store.open_stream(hello(), NOW + SECOND) == 2
    store.close()
    reopened = open_store(url, migrate=False)
    assert reopened.open_stream(hello(), NOW + SECOND) == 2
    reopened.close()


def test_resent_frames_are_stored_once(store: Store) -> None:
    store.open_stream(hello(), NOW)
    write = first_write()
    write.frames.append(RejectedFrame(3, "no content"))
    store.apply([write], NOW)
    before = (store.ranges(run_id(1)), store.ranks(run_id(1)))
    store.apply([write], NOW)
    assert (store.ranges(run_id(1)), store.ranks(run_id(1))) == before
    assert before[0] == [RankRanges(0, (step_range(1, 1, 10),))]
    assert (before[1][0].acked_frame, before[1][0].rejected_frames) == (3, 1)


def test_a_gap_stores_nothing_of_the_whole_call(store: Store) -> None:
    for rank in (0, 1):
        store.open_stream(hello(rank=rank, world_size=2), NOW)
    gap = StreamWrite(key(rank=1), "default", [Frame(2, facts())])
    with pytest.raises(ValueError, match=r"frame 2 .* would leave a gap after 0"):
        store.apply([first_write(), gap], NOW)
    assert [rank.acked_frame for rank in store.ranks(run_id(1))] == [0, 0]
    assert store.definitions("default", [hash_of(1)]) == {}


def test_a_rank_that_never_said_hello_cannot_write(store: Store) -> None:
    with pytest.raises(ValueError, match="never said hello"):
        store.apply([first_write()], NOW)


def test_definitions_come_back_as_they_were(store: Store) -> None:
    store.open_stream(hello(), NOW)
    store.apply([StreamWrite(key(), "default", [], list(BODIES))], NOW)
    store.apply([StreamWrite(key(), "default", [], list(BODIES))], NOW)
    wanted = [*(body.hash for body in BODIES), hash_of(99)]
    assert store.definitions("default", wanted) == {body.hash: body for body in BODIES}
    assert store.definitions("elsewhere", wanted) == {}


def test_shapes_of_an_unknown_pattern_are_refused(store: Store) -> None:
    store.open_stream(hello(), NOW)
    with pytest.raises(ValueError, match="which is not stored"):
        store.apply([StreamWrite(key(), "default", [], [shapes()])], NOW)


def test_definitions_of_one_project_are_unknown_to_another(store: Store) -> None:
    store.open_stream(hello(), NOW)
    store.open_stream(hello(2, project="other"), NOW)
    store.apply([first_write()], NOW)
    assert store.definitions("other", [hash_of(1)]) == {}
    other = first_write(2)
    store.apply([StreamWrite(other.key, "other", other.frames, other.definitions)], NOW)
    assert store.definitions("other", [hash_of(1)]) == {hash_of(1): pattern()}


def test_unordered_patterns_and_statistics_come_back(store: Store) -> None:
    store.open_stream(hello(), NOW)
    unordered = dataclasses.replace(pattern(2), order=(), unordered=True)
    statistics = (BytesStatistics(0, 3, 12, 2, 6), BytesStatistics(2, 1, 2**62, 2**62, 2**62))
    varying = dataclasses.replace(
        step_range(pattern_number=2), shapes_hash=None, lines_hash=None, statistics=statistics, statistics_steps=1
    )
    store.apply([StreamWrite(key(), "default", [Frame(1, varying)], [unordered])], NOW)
    assert store.ranges(run_id(1)) == [RankRanges(0, (varying,))]
    assert store.definitions("default", [hash_of(2)]) == {hash_of(2): unordered}


def test_a_grown_range_replaces_the_older_of_its_number(store: Store) -> None:
    store.open_stream(hello(), NOW)
    store.apply([first_write()], NOW)
    grown = step_range(1, 1, 40)
    store.apply([StreamWrite(key(), "default", [Frame(3, grown), Frame(4, step_range(2, 41, 41))])], NOW)
    assert store.ranges(run_id(1)) == [RankRanges(0, (grown, step_range(2, 41, 41)))]
    assert store.ranks(run_id(1))[0].stored_steps == 41


def test_unfinished_steps_are_not_counted_as_stored(store: Store) -> None:
    store.open_stream(hello(), NOW)
    store.apply([first_write()], NOW)
    rest = dataclasses.replace(step_range(2, 11, 11), unfinished=True)
    store.apply([StreamWrite(key(), "default", [Frame(3, rest)], progress=progress(2, 90, 80, 10))], NOW)
    assert store.ranges(run_id(1))[0].ranges[1] == rest
    assert store.ranks(run_id(1))[0].stored_steps == 10


def test_progress_grows_the_open_range_and_never_goes_back(store: Store) -> None:
    store.open_stream(hello(), NOW)
    store.apply([first_write()], NOW)
    store.apply([StreamWrite(key(), "default", progress=progress(1, 25, 24, 25, 100, "spool full"))], NOW)
    store.apply([StreamWrite(key(), "default", progress=progress(1, 12, 12, 12, 48))], NOW)
    rank = store.ranks(run_id(1))[0]
    assert (rank.steps, rank.calls, rank.stored_steps, rank.detail) == (25, 100, 24, "spool full")
    assert store.ranges(run_id(1))[0].ranges == (dataclasses.replace(step_range(1, 1, 25), steps=24),)
    # An older frame of the range that is resent later does not take steps back.
    store.apply([StreamWrite(key(), "default", [Frame(3, step_range(1, 1, 20))])], NOW)
    assert store.ranges(run_id(1))[0].ranges == (dataclasses.replace(step_range(1, 1, 25), steps=24),)


def test_progress_of_a_range_that_is_not_stored_only_counts(store: Store) -> None:
    store.open_stream(hello(), NOW)
    store.apply([StreamWrite(key(), "default", progress=progress(9, 5, 5, 5, 20))], NOW)
    assert store.ranges(run_id(1)) == [RankRanges(0, ())]
    assert (store.run(run_id(1)).steps, store.run(run_id(1)).calls) == (5, 20)  # type: ignore[union-attr]


def test_a_run_is_complete_when_every_rank_said_clean_goodbye(store: Store) -> None:
    for rank in (0, 1):
        store.open_stream(hello(rank=rank, world_size=2), NOW)
    store.apply([StreamWrite(key(rank=0), "default", goodbye=goodbye())], NOW + SECOND)
    run = store.run(run_id(1))
    assert run is not None
    assert (run.state, run.ended_unix_ns) == ("running", None)
    assert [rank.state for rank in store.ranks(run_id(1))] == ["clean", "live"]
    store.apply([StreamWrite(key(rank=1), "default", goodbye=goodbye())], NOW + 2 * SECOND)
    run = store.run(run_id(1))
    assert run is not None
    assert (run.state, run.ended_unix_ns, run.last_seen_unix_ns) == ("complete", NOW + 2 * SECOND, NOW + 2 * SECOND)


def test_one_process_that_stands_for_all_ranks_completes_the_run(store: Store) -> None:
    alone = dataclasses.replace(hello(world_size=64), reporting_ranks=1)
    store.open_stream(alone, NOW)
    run = store.run(run_id(1))
    assert run is not None
    assert (run.world_size, run.expected_ranks, run.state) == (64, 1, "running")
    store.apply([StreamWrite(key(), "default", goodbye=goodbye())], NOW)
    assert store.run(run_id(1)).state == "complete"  # type: ignore[union-attr]
    store.open_stream(hello(attempt=1, world_size=2), NOW)
    assert store.run(run_id(1)).expected_ranks == 2  # type: ignore[union-attr]


def test_a_rank_that_never_came_keeps_the_run_from_being_complete(store: Store) -> None:
    store.open_stream(hello(world_size=2), NOW)
    store.apply([StreamWrite(key(), "default", goodbye=goodbye())], NOW)
    assert store.run(run_id(1)).state == "running"  # type: ignore[union-attr]
    assert store.mark_lost(NOW, NOW + SECOND) == []
    assert store.run(run_id(1)).state == "running"  # type: ignore[union-attr]
    assert store.mark_lost(NOW + 1, NOW + SECOND) == []
    run = store.run(run_id(1))
    assert run is not None
    assert (run.state, run.ended_unix_ns) == ("lost", NOW)


@pytest.mark.parametrize("ending", ["exception", "lost"])
def test_a_rank_that_did_not_end_cleanly_makes_the_run_lost(store: Store, ending: str) -> None:
    for rank in (0, 1):
        store.open_stream(hello(rank=rank, world_size=2), NOW)
    store.apply([StreamWrite(key(rank=1), "default", goodbye=goodbye(ending, "RuntimeError"))], NOW)
    assert store.run(run_id(1)).state == "running"  # type: ignore[union-attr]
    store.apply([StreamWrite(key(rank=0), "default", goodbye=goodbye())], NOW)
    assert store.run(run_id(1)).state == "lost"  # type: ignore[union-attr]
    assert [(rank.state, rank.detail) for rank in store.ranks(run_id(1))] == [("clean", ""), (ending, "RuntimeError")]


def test_only_silent_live_ranks_are_marked_lost(store: Store) -> None:
    for rank in (0, 1, 2):
        store.open_stream(hello(rank=rank, world_size=3), NOW)
    store.apply([StreamWrite(key(rank=0), "default", goodbye=goodbye())], NOW)
    store.apply([StreamWrite(key(rank=1), "default", progress=progress())], NOW + 5 * SECOND)
    assert store.mark_lost(NOW + SECOND, NOW + 6 * SECOND) == [key(rank=2)]
    assert [rank.state for rank in store.ranks(run_id(1))] == ["clean", "live", "lost"]
    assert store.run(run_id(1)).state == "running"  # type: ignore[union-attr]
    assert store.mark_lost(NOW + 6 * SECOND, NOW + 9 * SECOND) == [key(rank=1)]
    run = store.run(run_id(1))
    assert run is not None
    assert (run.state, run.ended_unix_ns) == ("lost", NOW + 9 * SECOND)


def test_a_lost_rank_that_comes_back_is_live_and_so_is_its_run(store: Store) -> None:
    store.open_stream(hello(), NOW)
    store.mark_lost(NOW + 1, NOW + SECOND)
    assert store.run(run_id(1)).state == "lost"  # type: ignore[union-attr]
    store.open_stream(hello(), NOW + 2 * SECOND)
    run = store.run(run_id(1))
    assert run is not None
    assert (run.state, run.ended_unix_ns, store.ranks(run_id(1))[0].state) == ("running", None, "live")
    store.mark_lost(NOW + 3 * SECOND, NOW + 3 * SECOND)
    store.apply([StreamWrite(key(), "default", progress=progress())], NOW + 4 * SECOND)
    assert store.run(run_id(1)).state == "running"  # type: ignore[union-attr]


def test_hello_after_goodbye_changes_nothing(store: Store) -> None:
    store.open_stream(hello(), NOW)
    store.apply([StreamWrite(key(), "default", goodbye=goodbye())], NOW)
    assert store.open_stream(hello(), NOW + SECOND) == 0
    assert store.run(run_id(1)).state == "complete"  # type: ignore[union-attr]


def test_a_new_attempt_supersedes_the_older(store: Store) -> None:
    store.open_stream(hello(world_size=2), NOW)
    store.open_stream(hello(rank=1, world_size=2), NOW)
    store.apply([first_write(), first_write(rank=1)], NOW)
    store.apply([StreamWrite(key(rank=1), "default", goodbye=goodbye("lost"))], NOW)
    assert store.open_stream(hello(attempt=1, world_size=1), NOW + SECOND) == 0
    run = store.run(run_id(1))
    assert run is not None
    assert (run.attempt, run.world_size, run.state, run.steps, run.environment) == (1, 1, "running", 0, None)
    assert [(rank.attempt, rank.rank) for rank in store.ranks(run_id(1))] == [(1, 0)]
    assert store.ranges(run_id(1)) == [RankRanges(0, ())]
    # A late frame of the older attempt is stored, and changes nothing that readers see.
    store.apply([StreamWrite(key(rank=0), "default", goodbye=goodbye())], NOW + SECOND)
    assert store.run(run_id(1)).state == "running"  # type: ignore[union-attr]
    store.apply([StreamWrite(key(attempt=1), "default", goodbye=goodbye())], NOW + SECOND)
    assert store.run(run_id(1)).state == "complete"  # type: ignore[union-attr]


def test_a_run_of_another_project_is_refused(store: Store) -> None:
    store.open_stream(hello(), NOW)
    with pytest.raises(ValueError, match="belongs to another project than 'other'"):
        store.open_stream(hello(project="other"), NOW)
    assert [run.project for run in store.runs()] == ["default"]


def test_the_environment_is_merged_over_ranks(store: Store) -> None:
    for rank in (0, 1):
        store.open_stream(hello(rank=rank, world_size=2), NOW)
    assert store.run(run_id(1)).environment is None  # type: ignore[union-attr]
    small = dataclasses.replace(facts("nccl 2.27.5+gloo", "compile"), mesh=(MeshDimension("tp", 2),))
    store.apply(
        [
            StreamWrite(key(rank=0), "default", [Frame(1, small)], [modules()]),
            StreamWrite(key(rank=1), "default", [Frame(1, facts())], [modules()]),
        ],
        NOW,
    )
    mesh = (MeshDimension("dp", 2), MeshDimension("tp", 2))
    expected = Environment("2.13.0+cpu", "gloo+nccl 2.27.5", "cpu", 2, mesh, "compile")
    assert store.run(run_id(1)).environment == expected  # type: ignore[union-attr]
    assert store.ranks(run_id(1))[0].facts == small


def test_runs_are_filtered_and_newest_first(store: Store) -> None:
    side = Commit(sha(9), "side", True, (), "")
    store.open_stream(hello(1), NOW)
    store.open_stream(hello(2, started_unix_ns=NOW + 1, commit=side), NOW)
    store.open_stream(hello(3, started_unix_ns=NOW + 2, workload="eval"), NOW)
    store.open_stream(hello(4, started_unix_ns=NOW + 3, project="other"), NOW)
    store.apply([StreamWrite(key(3), "default", goodbye=goodbye())], NOW)

    def ids(**filters: str) -> list[str]:
        return [run.id for run in store.runs(**filters)]  # type: ignore[arg-type]

    assert ids() == [run_id(4), run_id(3), run_id(2), run_id(1)]
    assert ids(project="default") == [run_id(3), run_id(2), run_id(1)]
    assert ids(workload="eval") == [run_id(3)]
    assert ids(commit_sha=sha(9)) == [run_id(2)]
    assert ids(branch="main", project="default") == [run_id(3), run_id(1)]
    assert ids(state="complete") == [run_id(3)]
    assert [run.id for run in store.runs(limit=2, offset=1)] == [run_id(3), run_id(2)]
    assert store.run_ids("00000000", limit=3) == [run_id(4), run_id(3), run_id(2)]
    assert store.run_ids("%") == []
    run = store.run(run_id(1))
    assert run is not None
    assert (run.commit_sha, run.commit_subject, run.branch, run.dirty) == (sha(7), "Seven", "main", False)
    assert store.run(run_id(77)) is None
    assert store.ranks(run_id(77)) == []
    assert store.ranges(run_id(77)) == []


def test_writers_from_several_threads_take_turns(store: Store) -> None:
    ranks = range(4)
    for rank in ranks:
        store.open_stream(hello(rank=rank, world_size=4), NOW)
    failures: list[BaseException] = []

    def report(rank: int) -> None:
        try:
            for number in range(1, 21):
                body = dataclasses.replace(pattern(100 + number), calls=(call(number),), order=(0,))
                frame = Frame(number, dataclasses.replace(facts(), modules_hash=None))
                store.apply([StreamWrite(key(rank=rank), "default", [frame], [body])], NOW)
        except BaseException as error:  # noqa: BLE001  # reported by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=report, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert [rank.acked_frame for rank in store.ranks(run_id(1))] == [20, 20, 20, 20]
