"""The parts of every iteration add up to its wall time, and the shape of the batch is that of the running requests."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from alignedserve.messages.iterations import IterationCompleted, IterationTimes, RunIteration
from alignedserve.worker_core.iteration_log import IterationLog, totals_of
from decode_worker.batching.scheduled_batch import ScheduledBatch
from decode_worker.colocated.logic import ColocatedLogic
from decode_worker.logic import DecodeLogic
from decode_worker.state import RunningRequest
from tests.property.test_every_request_ends_once import SHAPES, make_requests
from tests.support.logic_cluster import LogicCluster
from tests.support.samples import request

pytestmark = pytest.mark.slow

SPANS = st.one_of(st.just(0.0), st.floats(1e-6, 100.0))


@st.composite
def iterations(draw: st.DrawFn) -> list[tuple[float, ...]]:
    """Durations of each: idle, arrival and grant before its start, way there, prepare, forward, sampling, way back."""
    spans = [SPANS, st.floats(-50, 50), st.floats(-50, 50), SPANS, SPANS, SPANS, SPANS, SPANS]
    return draw(st.lists(st.tuples(*spans), min_size=1, max_size=20))


@given(iterations(), st.floats(0.0, 1e6))
def test_the_parts_add_up(times: list[tuple[float, ...]], now: float) -> None:
    iteration_log = IterationLog()
    iteration_log.take_totals(now)
    began = now
    for idle, arrival, grant, way_there, prepare, forward, sampling, way_back in times:
        now += idle
        member = RunningRequest(request(arrival_s=now - arrival), 1, [], [], 3, granted_s=now - grant)
        iteration_log.iteration_started(now, [member], has_changed=True)
        started = now + way_there
        finished = started + prepare + forward + sampling
        now = finished + way_back
        iteration_log.iteration_completed(
            now, IterationCompleted((), times=IterationTimes(started, finished, prepare, forward, sampling))
        )
        record = iteration_log.records()[-1]
        assert record.parts_s == pytest.approx(record.wall_s, rel=1e-6, abs=1e-6)
        assert min(record.nothing_to_do_s, record.waiting_for_prefill_s, record.prefetch_not_ready_s) >= 0.0
        assert record.turnaround_s >= 0.0
    assert totals_of(iteration_log.records()).wall_s == pytest.approx(now - began, abs=1e-6)


class Inspected(LogicCluster):
    """Whenever an iteration is asked for, compares the ledger with the running requests."""

    num_inspected = 0

    @override
    def _perform(self, name: str, command: object) -> None:
        logic = self.logics[name]
        is_worker = isinstance(logic, DecodeLogic | ColocatedLogic)
        if is_worker and isinstance(command, RunIteration) and command.slices:
            assert isinstance(logic, DecodeLogic | ColocatedLogic)
            if isinstance(logic, ColocatedLogic):
                lengths = [one.context_len for one in logic._members]
            elif isinstance(logic._batch, ScheduledBatch):
                lengths = [logic._batch[request_id].context_len for request_id, _ in command.slices]
            else:
                following = logic._batch._additions  # who enters with the next iteration
                lengths = [one.context_len for one in logic._batch if one.request.request_id not in following]
            shape = logic.iteration_log._shape
            assert (shape.size, shape.sum) == (len(lengths), sum(lengths))
            assert (shape.shortest, shape.longest) == (min(lengths), max(lengths))
            self.num_inspected += 1
        super()._perform(name, command)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shape_is_that_of_the_running_requests_whatever_happens(shape: object) -> None:
    rng = random.Random(1)
    cluster = Inspected(shape, 1)  # type: ignore[arg-type]
    for asked in make_requests(rng, 25):
        cluster.submit(asked)
        for _ in range(rng.randrange(40)):
            cluster.step()
        if rng.random() < 0.2:
            cluster.abort(asked.request_id)
    cluster.run()
    assert cluster.num_inspected > 50
    assert cluster.status().iteration_log.num_iterations > 50
