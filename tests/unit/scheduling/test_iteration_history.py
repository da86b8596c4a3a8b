"""What a worker remembers and foresees: iterations, the rest of a request, contexts cheaper side by side."""

from dataclasses import replace

import numpy as np
import pytest

from alignedserve.costmodel.linear import LinearCoefficients, LinearIterationModel
from alignedserve.costmodel.model import AttentionKernel, chunk_within
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policy import DeviceMemory, IterationHistory
from alignedserve.scheduling.runtime_estimate import RequestRuntimeModel, fit_request_runtime, remaining_output_len
from alignedserve.scheduling.scheduler_state import MovedProgress, SchedulerState
from alignedserve.scheduling.table_operations import is_cheap_beside, is_mixing_cheaper
from lab.costmodel.choice import WorkerSpec, make_cost_model
from tests.harnesses.scheduling import EasyCosts, table_of
from tests.support.costs import decodes
from tests.support.marks import each
from tests.support.samples import request


def _history(*durations_s: float) -> IterationHistory:
    history = IterationHistory()
    for duration_s in durations_s:
        history.note(duration_s)
    return history


def test_nothing_has_happened() -> None:
    assert _history() == IterationHistory(0, 0.0, 0.0, 0.0)


def test_the_first_iteration_is_the_average() -> None:
    history = _history(0.5)
    assert (history.num_iterations, history.last_s, history.mean_s, history.max_s) == (1, 0.5, 0.5, 0.5)


def test_a_tenth_of_the_average_is_the_latest() -> None:
    history = _history(0.5, 1.5, 0.1)
    assert history.mean_s == pytest.approx(0.9 * 0.6 + 0.1 * 0.1)
    assert (history.last_s, history.max_s) == (0.1, 1.5)


@each(("num_after", "max_s"), [(63, 9.0), (64, 9.0), (126, 9.0), (127, 9.0), (128, 1.0)])
def test_a_maximum_is_forgotten_after_two_windows(num_after: int, max_s: float) -> None:
    assert _history(9.0, *[1.0] * num_after).max_s == max_s


def test_the_stretch_is_what_gaps_take_beyond_predictions() -> None:
    history = IterationHistory()
    for number in range(300):
        history.note_error(0.1, 0.12, now=0.15 * number)  # with 30 ms between two
    assert history.stretch == pytest.approx(1.5, abs=0.01)
    history.note_error(0.1, 0.15, now=100.0)  # after a rest
    assert history.stretch == pytest.approx(1.5, abs=0.01)
    history.note_error(0.1, 9.0, now=110.0)
    assert history.stretch < 1.54


def test_an_urgent_iteration_is_part_of_the_one_around_it() -> None:
    """A pass of 0.1 s that stands still for 0.05 s is one gap of 0.15 s, and as long as was predicted of both."""
    history = IterationHistory()
    for number in range(1, 200):
        history.note(0.05, is_urgent=True)
        history.note_error(0.05, 0.05, now=0.15 * number - 0.04, is_urgent=True)
        history.note(0.1)
        history.note_error(0.1, 0.1, now=0.15 * number)
    assert history.num_iterations == 199
    assert (history.last_s, history.mean_s, history.max_s) == pytest.approx((0.15, 0.15, 0.15))
    assert history.stretch == pytest.approx(1.0)


def test_the_maximum_covers_64_iterations_at_least() -> None:
    durations = [1.0] * 63 + [9.0]  # the last of a window
    assert _history(*durations, *[1.0] * 64).max_s == 9.0
    assert _history(*durations, *[1.0] * 65).max_s == 1.0


@each(
    ("budget_s", "at_most", "step", "chunk"),
    [
        (0.110, 100, 1, 100),  # 10 ms and one for each token: exactly
        (0.1095, 100, 1, 99),
        (0.0115, 100, 1, 1),
        (0.0105, 100, 1, 0),
        (0.001, 100, 1, 0),
        (0.110, 0, 1, 0),
        (0.090, 100, 32, 64),
        (0.110, 100, 32, 100),  # all of it, though no multiple
        (0.041, 100, 32, 0),
        (1.0, 5, 32, 5),
    ],
)
def test_the_chunk_that_a_budget_leaves_room_for(budget_s: float, at_most: int, step: int, chunk: int) -> None:
    costs = EasyCosts(context_s=0.0)
    work = IterationWork()
    assert chunk_within(costs, work, num_cached=0, at_most=at_most, budget_s=budget_s, step=step) == chunk
    assert work == IterationWork()


def test_the_chunk_beside_what_is_packed() -> None:
    work = IterationWork()
    work.add_decodes(20, 2000, 100)  # 10 + 20 + 20 ms
    assert chunk_within(EasyCosts(), work, num_cached=0, at_most=100, budget_s=0.0805) == 30


def test_a_linear_cost_model_gives_its_own_coefficients() -> None:
    model = fit_request_runtime(EasyCosts(base_s=0.0, token_s=0.002, context_s=0.00003))
    assert model == pytest.approx(RequestRuntimeModel(0.002, 0.00003, 0.002))


def test_the_line_of_prompts_goes_through_the_origin() -> None:
    """10 ms + 1 ms for each token: the slope takes on 10 ms times 3968 / 5586944, sums over the probed lengths."""
    model = fit_request_runtime(EasyCosts())
    assert model == pytest.approx(RequestRuntimeModel(0.001 + 0.010 * 3968 / 5586944, 0.00001, 0.011))


def test_what_is_left_of_a_request() -> None:
    rows = {
        "new": {"prompt_len": 50},
        "half prefilled": {"prompt_len": 50, "num_cached": 20},
        "decodes": {"prompt_len": 50, "num_generated": 10},
        "dropped": {"prompt_len": 50, "num_generated": 10, "num_cached": 0},
    }
    remaining_s = RequestRuntimeModel(0.001, 0.00001, 0.010).remaining_s(table_of(rows), np.array([8.0, 8.0, 8.0, 8.0]))
    assert remaining_s == pytest.approx([0.05 + 0.084, 0.03 + 0.084, 0.0848, 0.06 + 0.0848])


@each(
    ("num_generated", "left", "num_overruns"),
    [(0, 10, 0), (9, 1, 0), (10, 10, 1), (19, 1, 1), (20, 20, 2), (25, 15, 2), (40, 10, 3), (49, 1, 3)],
)
def test_an_overrun_doubles_the_prediction_up_to_the_limit(num_generated: int, left: int, num_overruns: int) -> None:
    table = table_of({"a": {"max_tokens": 50, "predicted_len": 10, "num_generated": num_generated}})
    assert [values.tolist() for values in remaining_output_len(table)] == [[left], [num_overruns]]


def test_no_request_overruns_without_a_prediction() -> None:
    table = table_of({"a": {"max_tokens": 50, "num_generated": 49}})
    assert [values.tolist() for values in remaining_output_len(table)] == [[1], [0]]


class Decodes:
    """Forty decodes of about 500 tokens on an H100."""

    def __init__(self, kernel: AttentionKernel) -> None:
        self.costs = make_cost_model("roofline", WorkerSpec("opt-6.7b", "h100", kernel=kernel))
        self.state = SchedulerState(DeviceMemory(4000, 4000, 16))
        for number in range(40):
            self.add(f"r{number}", 480 + number)

    def add(self, name: str, prompt_len: int) -> None:
        self.state.hold(num_blocks := -(-prompt_len // 16))
        progress = MovedProgress(8.0, 1, prompt_len, num_blocks, 0.0, 0.0)
        self.state.attach(request(name, prompt_len=prompt_len), 0.0, progress)

    def is_mixing_cheaper(self, context_lens: list[int]) -> bool:
        return is_mixing_cheaper(self.state.table, self.costs, context_lens)


@each("context_len", [50, 500, 8000])
def test_any_length_mixes_where_attention_costs_the_sum(context_len: int) -> None:
    assert Decodes(AttentionKernel.LOAD_BALANCED).is_mixing_cheaper([context_len] * 40)


@each(("context_len", "is_worth"), [(50, False), (500, True), (520, True), (8000, False)])
def test_only_like_lengths_mix_where_the_longest_is_a_straggler(context_len: int, *, is_worth: bool) -> None:
    made = Decodes(AttentionKernel.ONE_BLOCK_PER_SEQUENCE)
    assert made.is_mixing_cheaper([context_len] * 40) == is_worth


def test_a_batch_with_a_straggler_of_its_own_is_not_added_to_another_one() -> None:
    made = Decodes(AttentionKernel.ONE_BLOCK_PER_SEQUENCE)
    made.add("straggler", 5000)
    assert not made.is_mixing_cheaper([500] * 40)
    assert not made.is_mixing_cheaper([500] * 39 + [5100])


SCHEDULED = LinearCoefficients(base_s=0.01, decode_s=1e-5, context_token_s=1e-7, straggler=132.0)


@each(
    ("context_lens", "is_worth"),
    [
        ([500] * 40, True),
        ([500] * 120, True),
        ([700] * 200, True),  # which fill the device, in place of waiting for the longest
        ([50] * 40, False),  # which would wait for those here
        ([8000] * 40, False),  # for which those here would wait
        ([8000], False),
        ([500] * 39 + [5100], False),
        ([5000] + [480] * 1600, True),  # which hardly prolongs so large an iteration
    ],
)
def test_only_like_lengths_mix_where_a_schedule_leaves_the_device_idle(
    context_lens: list[int], *, is_worth: bool
) -> None:
    assert is_cheap_beside(decodes(40, 500), LinearIterationModel(SCHEDULED), context_lens) == is_worth
    assert is_cheap_beside(decodes(40, 500), LinearIterationModel(replace(SCHEDULED, straggler=0.0)), context_lens)


def test_a_batch_that_waits_for_its_longest_takes_no_short_contexts() -> None:
    here = decodes(60, 500)
    here.add_decode(8000)
    for context_len, num, is_worth in ((500, 10, False), (500, 500, False), (7900, 10, False), (7900, 400, True)):
        assert is_cheap_beside(here, LinearIterationModel(SCHEDULED), [context_len] * num) == is_worth
