"""The decode worker's ledger, number by number. Times are sums of powers of two, so that they add up exactly."""

import json
from pathlib import Path
from typing import Any

import pytest

from alignedserve.core.ids import RequestId
from alignedserve.core.request import SampledToken
from alignedserve.messages.cluster_view import SPREAD_EDGES, IterationLogTotals
from alignedserve.messages.iterations import Addition, IterationCompleted, IterationTimes, RunIteration
from alignedserve.worker_core.iteration_log import IterationLog, IterationRecord, totals_of
from alignedserve.worker_core.service import write_iterations
from decode_worker.state import RunningRequest
from tests.support.marks import each
from tests.support.samples import R1, request


def member(name: str = "r1", context_len: int = 8, *, arrival_s: float = 0.0, granted_s: float = 0.0) -> RunningRequest:
    asked = request(name, prompt_len=context_len, arrival_s=arrival_s)
    return RunningRequest(asked, 1, [], [], context_len - 1, granted_s=granted_s)


def entering(*members: RunningRequest, removals: tuple[RequestId, ...] = ()) -> RunIteration:
    additions = tuple(Addition(one.request, (), ()) for one in members)
    return RunIteration(removals, additions, (), ())


GOING_ON = RunIteration((), (), (), ())


class IterationLogHarness:
    """A ledger and its batch; an iteration takes one second, half of it in the forward pass."""

    def __init__(self, **sizes: int) -> None:
        self.iteration_log = IterationLog(**sizes)
        self.running: dict[RequestId, RunningRequest] = {}
        self.now = 0.0
        self.iteration_log.take_totals(0.0)  # a tick: time begins

    def join(self, *members: RunningRequest) -> RunIteration:
        self.running.update({one.request.request_id: one for one in members})
        return entering(*members)

    def leave(self, name: str) -> RunIteration:
        del self.running[RequestId(name)]
        return entering(removals=(RequestId(name),))

    def run(self, command: RunIteration = GOING_ON, **more: Any) -> IterationRecord:
        """Run one iteration from now on; `sampled`: who gets a token, everyone by default."""
        is_switching = more.pop("is_switching", False)
        sampled = more.pop("sampled", tuple(self.running))
        has_changed = bool(command.additions or command.removals)
        batch = self.running.values()
        self.iteration_log.iteration_started(self.now, batch, has_changed=has_changed, is_switching=is_switching)
        self.now += 1.0
        times = more.pop("times", one_second(self.now - 1.0))
        tokens = tuple(SampledToken(request_id, 5) for request_id in sampled)
        self.iteration_log.iteration_completed(self.now, IterationCompleted(tokens, times=times, **more))
        for request_id in sampled:
            append_token(self.running[request_id])
        return self.iteration_log.records()[-1]


def append_token(running: RunningRequest) -> None:
    running.append(SampledToken(running.request.request_id, 5), frozenset())


def one_second(started: float) -> IterationTimes:
    """Begins and ends an eighth away from what the logic sees."""
    return IterationTimes(
        started_s=started + 0.125,
        finished_s=started + 0.875,
        prepare_s=0.125,
        forward_s=0.5,
        sampling_s=0.125,
        attention_s=0.25,
        straggler_share=0.25,
        is_ahead=True,
    )


def waits(record: IterationRecord) -> tuple[float, float, float]:
    return record.nothing_to_do_s, record.waiting_for_prefill_s, record.prefetch_not_ready_s


def lengths(record: IterationRecord) -> tuple[int, int, float, int]:
    return record.batch_size, record.shortest, record.mean, record.longest


# --- the parts of an iteration


def test_one_iteration_in_all_its_parts() -> None:
    harness = IterationLogHarness()
    harness.now = 16.0
    record = harness.run(
        harness.join(member(context_len=8, arrival_s=4.0, granted_s=12.0), member("r2", 10, granted_s=14.0))
    )
    assert record == IterationRecord(
        number=0,
        started_s=16.0,
        batch_size=2,
        is_switching=False,
        shortest=8,
        mean=9.0,
        longest=10,
        wall_s=17.0,
        nothing_to_do_s=0.0,  # r2 arrived at 0
        waiting_for_prefill_s=12.0,  # r1 was granted first
        prefetch_not_ready_s=4.0,
        turnaround_s=0.25,
        prepare_s=0.125,
        forward_s=0.5,
        sampling_s=0.125,
        attention_s=0.25,
        misaligned_s=0.0625,
        is_ahead=True,
        straggler_share=0.25,
    )
    assert record.parts_s == record.wall_s


def test_times_beyond_what_the_logic_saw_are_not_believed() -> None:
    harness = IterationLogHarness()
    assert harness.run(harness.join(member()), times=IterationTimes(-3.0, 99.0, 0.125, 0.5, 0.125)).turnaround_s == 0.0


def test_an_iteration_without_times_was_all_forward() -> None:
    harness = IterationLogHarness()
    record = harness.run(harness.join(member()), times=None)
    assert (record.wall_s, record.forward_s, record.parts_s) == (1.0, 1.0, 1.0)


def test_an_end_without_a_start_is_a_broken_invariant() -> None:
    harness = IterationLogHarness()
    harness.run(harness.join(member()))
    for iteration_log in (IterationLog(), harness.iteration_log):
        with pytest.raises(AssertionError, match="not started"):
            iteration_log.iteration_completed(2.0, IterationCompleted(()))


# --- what a pause was for


@each(
    ("arrival_s", "granted_s", "expected"),
    [
        (5.0, 7.0, (4.0, 2.0, 1.0)),  # idle from 1 to 8
        (5.0, 8.0, (4.0, 3.0, 0.0)),
        (8.0, 8.0, (7.0, 0.0, 0.0)),
        (0.5, 1.0, (0.0, 0.0, 7.0)),  # granted while the last iteration ran
        (0.5, 6.0, (0.0, 5.0, 2.0)),
        (-9e9, 6.0, (0.0, 5.0, 2.0)),  # the clock of another host
        (9e9, 6.0, (5.0, 0.0, 2.0)),
        (9e9, 9e9, (7.0, 0.0, 0.0)),
    ],
)
def test_a_pause_is_split_by_the_request_that_ends_it(
    arrival_s: float, granted_s: float, expected: tuple[float, float, float]
) -> None:
    harness = IterationLogHarness()
    harness.run(harness.join(member()))
    harness.leave("r1")
    harness.now = 8.0
    record = harness.run(harness.join(member("r2", arrival_s=arrival_s, granted_s=granted_s)))
    assert waits(record) == expected
    assert record.wall_s == record.parts_s == 8.0


def test_time_begins_with_the_first_tick_or_the_first_iteration() -> None:
    iteration_log = IterationLog()
    one = member()
    iteration_log.iteration_started(5.0, [one], has_changed=True)
    iteration_log.iteration_completed(6.0, IterationCompleted(()))
    assert iteration_log.records()[0].wall_s == 1.0


# --- the shape of the batch


def test_all_requests_grow_by_a_token() -> None:
    harness = IterationLogHarness()
    assert lengths(harness.run(harness.join(member(context_len=4), member("r2", 10)))) == (2, 4, 7.0, 10)
    assert lengths(harness.run()) == (2, 5, 8.0, 11)
    assert lengths(harness.run()) == (2, 6, 9.0, 12)


def test_who_gets_no_token_does_not_grow() -> None:
    harness = IterationLogHarness()
    harness.run(harness.join(member(context_len=4), member("r2", 10)), sampled=(R1,))
    assert lengths(harness.run()) == (2, 5, 7.5, 10)


def test_members_come_and_go() -> None:
    harness = IterationLogHarness()
    harness.run(harness.join(member(context_len=4), member("r2", 10)))
    assert lengths(harness.run(harness.leave("r1"))) == (1, 11, 11.0, 11)
    assert lengths(harness.run(harness.join(member("r3", 3)))) == (2, 3, 7.5, 12)
    removals = harness.leave("r3").removals
    newcomer = member("r4", 5)
    harness.join(newcomer)
    assert lengths(harness.run(entering(newcomer, removals=removals))) == (2, 5, 9.0, 13)  # not r3's four


# --- the latest records and the sums


def test_the_sums_of_two_iterations() -> None:
    harness = IterationLogHarness()
    harness.run(harness.join(member(context_len=8), member("r2", 8)))
    harness.run(harness.leave("r2"), is_switching=True)
    harness.now = 4.0
    harness.run(harness.join(member("r3", 30, arrival_s=3.0, granted_s=3.5)), is_switching=True)  # beside r1: 10 and 30
    assert harness.iteration_log.take_totals(5.0) == IterationLogTotals(
        num_iterations=3,
        num_switch_iterations=2,
        num_requests=5,
        wall_s=5.0,
        prefetch_not_ready_s=2.0,  # r1 was granted long before
        turnaround_s=0.75,
        prepare_s=0.375,
        forward_s=1.5,
        sampling_s=0.375,
        misaligned_s=0.1875,
        sum_of_spreads=3.5,
        spread_counts=(2, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        num_ahead_iterations=3,
        sum_of_straggler_shares=0.75,
    )


@each(
    ("others", "bucket"), [(0, 0), (1, SPREAD_EDGES.index(2.0)), (2, SPREAD_EDGES.index(3.0)), (19, len(SPREAD_EDGES))]
)
def test_a_spread_on_an_edge_belongs_below_it(others: int, bucket: int) -> None:
    harness = IterationLogHarness()
    crowd = [member(f"o{number}", 1) for number in range(others)]
    record = harness.run(harness.join(member(context_len=10**6), *crowd))
    assert totals_of([record._replace(mean=record.longest / (1 + others))]).spread_counts.index(1) == bucket


def test_totals_are_given_once_a_second_and_only_what_is_new() -> None:
    harness = IterationLogHarness()
    assert harness.iteration_log.take_totals(0.5) is None
    harness.run(harness.join(member()))
    first = harness.iteration_log.take_totals(1.0)
    assert first is not None
    harness.run()
    assert harness.iteration_log.take_totals(1.75) is None
    second = harness.iteration_log.take_totals(2.0)
    assert second is not None
    assert (first.num_iterations, second.num_iterations) == (1, 1)
    assert first.plus(second) == totals_of(harness.iteration_log.records())
    assert harness.iteration_log.take_totals(9.0) is None


# --- the file


def test_the_file_has_a_line_for_every_record(tmp_path: Path) -> None:
    harness, path = IterationLogHarness(), tmp_path / "decode-0.iterations.jsonl"
    harness.run(harness.join(member()))
    harness.run()
    path.write_text("of an earlier life")
    write_iterations(path, harness.iteration_log.records())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, record in zip(lines, harness.iteration_log.records(), strict=True):
        assert line.pop("started_at").endswith("+00:00")
        assert line == record._asdict()
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path) -> None:
    target = tmp_path / "taken"
    target.mkdir()
    (target / "kept").touch()
    with pytest.raises(OSError):  # noqa: PT011  (which one depends on the file system)
        write_iterations(target, [])
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
