"""Facts that a recorded run tells beside its decisions, and the jitter of its iterations."""

import itertools
import random
import statistics

import pytest

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, RequestClass, SamplingParams
from alignedserve.costmodel.linear import LinearCoefficients, LinearIterationModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.messages.gateways import SubmitRequest
from alignedserve.messages.iterations import IterationCompleted, IterationTimes, RunIteration
from alignedserve.messages.workers import RequestFinished
from lab.replay.component_replay import Decided
from lab.replay.fitting import JitteryCosts, Ratio, fit_machine, fit_unmeasured
from lab.replay.observed import ObservedIteration, ObservedRun
from lab.replay.simulated import requests_of, think_times_s, workload_of
from router.state import LengthPredicted
from tests.support.costs import decodes, prefill


def observed(arrivals_s: list[float], ends_s: list[float], request_class: RequestClass) -> ObservedRun:
    """Return requests of one token each, which arrive and end at these times."""
    run = ObservedRun()
    for number, (arrival_s, end_s) in enumerate(zip(arrivals_s, ends_s, strict=True)):
        request_id = RequestId(f"r{number}")
        sampling = SamplingParams(max_tokens=1)
        request = Request(request_id, (0,) * 5, sampling, "unix:gateway", arrival_s, request_class)
        run.record_received(SubmitRequest(request), arrival_s + 0.5)
        run.requests[request_id].token_times_s[0] = run.requests[request_id].finished_s = end_s
    return run


def iteration(
    started_s: float, seconds: float = 1.0, *, engine_s: float = 0.0, num_decodes: int = 1
) -> ObservedIteration:
    work = decodes(num_decodes, 10)
    return ObservedIteration("decode-0", started_s, started_s + seconds, work, engine_s)


def test_a_part_of_a_run_has_what_was_in_its_time() -> None:
    run = observed([1.0, 2.0, 3.0], [2.5, 2.6, 3.5], RequestClass.REAL_TIME)
    run.iterations = [iteration(1.5), iteration(2.5), iteration(3.5)]
    for number, sent_s in enumerate((1.9, 2.9)):
        message = RequestFinished(RequestId(f"r{number}"), 0, 1)
        run.record_sent(message, sent_s)
        run.record_received(message, sent_s + 0.2 + number)
    part = run.within((2.0, 2.2), (2.2, 3.0))
    assert list(part.requests) == ["r1"]
    assert [one.started_s for one in part.iterations] == [2.5]
    assert part.submit_times_s() == [0.5]
    assert part.message_times_s() == [pytest.approx(0.2)]
    assert run.message_times_s() == [pytest.approx(0.2), pytest.approx(1.2)]


def test_a_client_s_pauses_are_from_an_end_to_the_next_arrival() -> None:
    # Two outstanding: the third arrives after the first end, whichever request that was.
    run = observed([0.0, 0.1, 2.3, 3.4, 9.0], [3.0, 2.0, 8.8, 9.9, 9.9], RequestClass.BEST_EFFORT)
    requests = requests_of(run)
    found = think_times_s(requests, {"be": 2, "rt": 1})
    assert found == {"be": pytest.approx(0.3), "rt": 0.0}
    assert [loop.think_s for loop in workload_of(requests, {"be": 2}, found).closed_loops] == [pytest.approx(0.3)]


def test_requests_keep_the_first_prediction_of_their_length() -> None:
    run = observed([0.0, 1.0], [2.0, 3.0], RequestClass.REAL_TIME)
    run.record_predicted(LengthPredicted(RequestId("r1"), 41.6))
    run.record_predicted(LengthPredicted(RequestId("r1"), 7.0))
    run.record_predicted(LengthPredicted(RequestId("unknown"), 7.0))
    assert [one.timed.predicted_len for one in requests_of(run)] == [None, 42]


def test_the_part_that_no_engine_measures_grows_with_the_requests() -> None:
    iterations = [
        iteration(number, 0.1, engine_s=0.1 - 0.002 - 0.0001 * number, num_decodes=number) for number in range(1, 20)
    ]
    assert fit_unmeasured(iterations).iteration_s(decodes(40, 10)) == pytest.approx(0.006)
    never_less = [iteration(number, 0.1, engine_s=0.2) for number in range(5)]
    assert fit_unmeasured(never_less).iteration_s(IterationWork()) == 0.0


def test_a_pass_computes_until_it_stands_still_and_an_urgent_one_from_then_on() -> None:
    """Its command comes before; and where the pass ends first, the urgent one runs behind it, within none."""
    run = ObservedRun()
    observer = run.observer("worker-0", None)

    def begin(now: float, *, is_urgent: bool = False) -> None:
        observer.take(Decided(None, now, [RunIteration((), (), (), (), is_urgent=is_urgent)]))

    def end(started_s: float, now: float, *, yielded_s: float = 0.0, is_urgent: bool = False) -> None:
        times = IterationTimes(started_s, now, 0.0, now - started_s - yielded_s, 0.0, yielded_s=yielded_s)
        observer.take(Decided(IterationCompleted((), times=times, is_urgent=is_urgent), now, []))

    begin(0.0)
    begin(0.10, is_urgent=True)
    end(0.14, 0.17, is_urgent=True)
    end(0.0, 0.30, yielded_s=0.03)
    begin(1.0)
    begin(1.08, is_urgent=True)
    end(1.0, 1.1)
    end(1.1, 1.13, is_urgent=True)
    begin(2.0)
    end(2.0, 2.1)
    assert [one.seconds for one in run.iterations] == pytest.approx([0.03, 0.27, 0.1, 0.03, 0.1])


def test_costs_are_fitted_to_passes_that_stood_still_for_urgent_ones() -> None:
    """Two workers; every pass of the first, of 0.2 s, has an urgent one of 0.1 s within it."""
    run = ObservedRun()
    for number in range(40):
        begin_s = 0.4 * number
        run.iterations += [
            ObservedIteration("prefill-0", begin_s + 0.05, begin_s + 0.15, prefill(100), 0.1),
            ObservedIteration("prefill-0", begin_s, begin_s + 0.3, prefill(200), 0.2, stood_still_s=0.1),
            ObservedIteration("decode-0", begin_s, begin_s + 0.2, decodes(4, 10), 0.2),
            ObservedIteration("decode-0", begin_s + 0.2, begin_s + 0.4, decodes(4, 10), 0.2),
        ]
    fit = fit_machine(run, 64)
    assert fit.prefill is not None
    doubled = fit.prefill.costs.iteration_s(prefill(200)) / fit.prefill.costs.iteration_s(prefill(100))
    assert doubled == pytest.approx(2.0, rel=0.05)


COSTS = LinearIterationModel(LinearCoefficients(base_s=1.0))


def test_iterations_with_a_prompt_take_ratios_of_such() -> None:
    ratios = [Ratio(1.0 + number / 1000, has_prompt=number % 5 == 0) for number in range(100)]
    costs = JitteryCosts(COSTS, ratios, seed=3)
    generator = random.Random(1)
    for _ in range(300):
        has_prompt = generator.random() < 0.3
        taken = costs.iteration_s(prefill(10) if has_prompt else decodes(2, 10))
        assert (round((taken - 1.0) * 1000) % 5 == 0) is has_prompt


def test_runs_go_on_as_they_were_recorded() -> None:
    costs = JitteryCosts(COSTS, [Ratio(float(number)) for number in range(1, 41)], seed=0)
    taken = [costs.iteration_s(decodes(1, 10)) for _ in range(16)]
    assert [(after - before) % 40 for before, after in itertools.pairwise(taken)] == [1.0] * 15


def test_a_kind_that_was_never_recorded_takes_any_ratio() -> None:
    costs = JitteryCosts(COSTS, [Ratio(2.0), Ratio(4.0)], seed=0)
    assert {costs.iteration_s(prefill(10)) for _ in range(40)} == {2.0, 4.0}


def test_the_mean_of_each_kind_is_kept() -> None:
    ratios = [Ratio(1.2, has_prompt=True), *[Ratio(0.9)] * 9] * 20
    costs = JitteryCosts(COSTS, ratios, seed=5)
    assert statistics.fmean(costs.iteration_s(prefill(10)) for _ in range(50)) == 1.2
    assert costs.iteration_s(decodes(1, 10)) == 0.9
