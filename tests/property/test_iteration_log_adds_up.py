"""The parts of every iteration add up to its wall time, and the shape of the batch is that of the running requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.messages.iterations import IterationCompleted, IterationTimes
from alignedserve.worker_core.iteration_log import IterationLog, totals_of
from decode_worker.state import RunningRequest
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
