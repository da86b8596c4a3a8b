"""How far decodes wait for the longest context, from timed decodes."""

import math
import random
from collections.abc import Sequence
from itertools import product

import pytest

from alignedserve.costmodel.hardware import hardware
from alignedserve.costmodel.linear import LinearCoefficients, LinearIterationModel, Sample
from alignedserve.costmodel.model import AttentionKernel, CostModel
from alignedserve.costmodel.model_shapes import model_shape
from alignedserve.costmodel.online import GENERIC, learned_from
from alignedserve.costmodel.straggler import (
    Delay,
    Straggler,
    delay_beside,
    straggler_in,
    straggler_of,
    straggler_points,
)
from alignedserve.costmodel.work import IterationWork
from lab.costmodel.choice import WorkerSpec, make_cost_model
from lab.costmodel.list_schedule import (
    DIVISIONS,
    Multiprocessors,
    accelerator_of,
    charged_keys,
    list_schedule,
    straggler_share,
)
from tests.support.costs import decodes
from tests.support.marks import each

POINTS = straggler_points(max_requests=256, max_context_len=32_768, num_tokens=65_536)
SUM, SHORT, LONGEST = 48_000, 4_000, 8_000


def straggler(short: float, equal: float, mixed: float, alone: float) -> Straggler:
    return straggler_of(short, equal, mixed, alone, num_keys=SUM, short_keys=SHORT, longest=LONGEST)


def timed(costs: CostModel) -> list[Sample]:
    return [Sample(point.work, costs.iteration_s(point.work)) for point in POINTS]


def test_a_straggler_is_what_mixed_contexts_take_longer() -> None:
    """44 000 keys take 11 ms, so 48 000 take 12 of the 20; mixed ones take 30 ms more, as many as 168 000."""
    assert straggler(0.009, 0.020, 0.050, 0.050) == pytest.approx((0.25e-6, 168_000 / 8_000, ""))


def test_a_difference_within_the_noise_is_none() -> None:
    assert straggler(0.009, 0.020, 0.0215, 0.006).share == 0.0
    assert straggler(0.0194, 0.020, 0.0215, 0.006).share == 0.0  # three times the attention, of next to none
    assert straggler(0.009, 0.020, 0.0245, 0.006).share == 0.0  # 1.4 times the attention: caches of a processor
    assert straggler(0.009, 0.020, 0.0185, 0.006) == pytest.approx((0.25e-6, 0.0, ""))


@each(
    "seconds",
    [
        (0.009, 0.020, 0.012, 0.006),  # mixed ones quicker than equal ones
        (0.009, 0.020, 0.030, 0.040),  # alone slower than among others
        (0.020, 0.020, 0.050, 0.050),  # contexts cost nothing, and a long one much
        (0.009, 0.020, math.nan, 0.006),
        (0.009, 0.020, math.inf, 0.006),
        (0.009, 0.020, 0.050, 0.0),
        (0.009, -0.020, 0.050, 0.050),
    ],
)
def test_times_that_contradict_each_other_say_why_and_count_for_nothing(seconds: tuple[float, ...]) -> None:
    said = straggler(*seconds)
    assert said.share == 0.0
    assert said.doubt


def test_mixed_contexts_are_as_many_and_as_long_together_as_equal_ones() -> None:
    short, equal, mixed, alone = (point.work for point in POINTS)
    assert (equal.num_decodes, equal.decode_context_len) == (mixed.num_decodes, mixed.decode_context_len)
    assert short.num_decodes == equal.num_decodes == 128
    assert equal.max_decode_context_len < mixed.max_decode_context_len == alone.decode_context_len
    assert max(equal.decode_context_len, mixed.decode_context_len) < 65_536


@each(
    ("context_len", "num_tokens", "requests"), [(64, 10**6, 64), (256, 10**6, 64), (8192, 4096, 64), (8192, 10**6, 8)]
)
def test_a_worker_too_small_for_a_useful_trial_has_none(context_len: int, num_tokens: int, requests: int) -> None:
    assert not straggler_points(max_requests=requests, max_context_len=context_len, num_tokens=num_tokens)


@each("longest", [1024, 2048, 8192])
@each("requests", [16, 128])
def test_equal_contexts_are_longer_than_short_ones(longest: int, requests: int) -> None:
    points = straggler_points(max_requests=requests, max_context_len=longest + 16, num_tokens=65_536)
    short, equal, *_ = (point.work for point in points)
    assert equal.decode_context_len > 2 * short.decode_context_len


@each("model", ["llama-3-8b", "llama-3-70b"])
@each("kernel", [AttentionKernel.LOAD_BALANCED, AttentionKernel.SECTIONS, AttentionKernel.FLASH_ATTENTION_2])
def test_what_schedules_take_is_read_as_it_is(model: str, kernel: AttentionKernel) -> None:
    """128 decodes of 8 heads of keys, or of 1, fill the multiprocessors, so that none is divided: 132 of them wait."""
    tensor_parallel = 8 if model == "llama-3-70b" else 1
    costs = make_cost_model("roofline", WorkerSpec(model, "h100", tensor_parallel, kernel))
    said, num_heads = straggler_in(timed(costs)), 8 // tensor_parallel
    assert not said.doubt
    scheduled = hardware("h100").num_multiprocessors / num_heads
    expected = scheduled if kernel is AttentionKernel.FLASH_ATTENTION_2 else 0.0
    assert said.share == pytest.approx(expected, rel=0.05)


def test_times_of_the_quickest_of_each_kind_count() -> None:
    costs = make_cost_model("roofline", WorkerSpec("llama-3-8b", "h100"))
    disturbed = [Sample(work, 3.0 * seconds) for work, seconds in timed(costs)[2:3]]
    assert straggler_in([*disturbed, *timed(costs)]) == straggler_in(timed(costs))


@each("left_out", range(4))
def test_too_few_timed_decodes_say_nothing(left_out: int) -> None:
    costs = make_cost_model("roofline", WorkerSpec("llama-3-8b", "h100", kernel=AttentionKernel.FLASH_ATTENTION_2))
    samples = timed(costs)
    assert straggler_in(samples).share > 10.0
    others: Sequence[Sample] = [*samples[:left_out], *samples[left_out + 1 :], Sample(IterationWork(), 1.0)]
    assert straggler_in(others) == Straggler()


def test_a_worker_learns_no_straggler_that_it_has_not_measured() -> None:
    assert GENERIC.straggler == 0.0
    balanced = LinearIterationModel(LinearCoefficients(base_s=0.01, decode_s=1e-5, context_token_s=1e-7))
    learned = learned_from(timed(balanced))
    even, uneven = decodes(64, 1000), decodes(63, 900)
    uneven.add_decode(64_000 - 63 * 900)
    for _ in range(50):
        learned.observe(even, balanced.iteration_s(even))
    assert learned.iteration_s(uneven) == learned.iteration_s(even)


def test_a_measured_straggler_stays_while_its_price_is_learned() -> None:
    machine = LinearIterationModel(LinearCoefficients(base_s=0.01, decode_s=1e-5, context_token_s=1e-7, straggler=66.0))
    learned = learned_from(timed(machine))
    assert learned.coefficients.straggler == pytest.approx(66.0)
    uneven = decodes(63, 500)
    uneven.add_decode(9000)
    assert learned.iteration_s(uneven) == pytest.approx(machine.iteration_s(uneven), rel=0.05)
    for _ in range(300):
        learned.observe(uneven, 2.0 * machine.iteration_s(uneven))
        learned.observe(decodes(64, 500), 2.0 * machine.iteration_s(decodes(64, 500)))
    assert learned.coefficients.straggler == pytest.approx(66.0)
    assert learned.iteration_s(uneven) == pytest.approx(2.0 * machine.iteration_s(uneven), rel=0.05)


@each(("num", "longest", "even_len"), [(200, 1_000, 2_000), (200, 90_000, 2_000), (20_000, 1_000, 200_000), (0, 0, 0)])
def test_a_context_delays_others_from_the_length_on_that_they_do_not_fill(
    num: int, longest: int, even_len: int
) -> None:
    """Contexts of 1 000 tokens together keep the device busy while one of a hundredth of their sum is read."""
    costs = LinearIterationModel(LinearCoefficients(base_s=0.01, context_token_s=1e-6, straggler=100.0))
    here = IterationWork()
    here.add_decodes(num, num * 1_000, longest)
    delay = delay_beside(here, costs)
    assert delay.even_len == pytest.approx(even_len, rel=0.01)
    assert delay.longer_token_s == pytest.approx(1e-4)


def test_an_even_kernel_knows_no_delay() -> None:
    costs = LinearIterationModel(LinearCoefficients(base_s=0.01, context_token_s=1e-6))
    assert delay_beside(decodes(1_000, 16_000), costs) == Delay()


# Decode attention as a list schedule, against schedules that are found by trying everything.

SMALL = Multiprocessors(num_multiprocessors=4, num_heads=2, num_query_heads=4)
LLAMA = WorkerSpec("llama-3-8b", "h100")  # eight heads of keys on 132 multiprocessors


def batch(lengths: list[int]) -> IterationWork:
    work = IterationWork()
    for length in lengths:
        work.add_decode(length)
    return work


def step_by_step(tasks: list[int], num_machines: int) -> int:
    """Let every machine work off its task one unit at a time."""
    waiting, left, steps = list(tasks), [0] * num_machines, 0
    while True:
        for machine in range(num_machines):
            while not left[machine] and waiting:
                left[machine] = waiting.pop(0)
        if not any(left):
            return steps
        left, steps = [max(one - 1, 0) for one in left], steps + 1


@each("seed", range(40))
def test_a_list_schedule_is_what_machines_do_and_near_the_best_there_is(seed: int) -> None:
    rng = random.Random(seed)
    tasks, num_machines = [rng.randint(1, 9) for _ in range(rng.randint(1, 7))], rng.randint(1, 3)
    found = list_schedule(tasks, num_machines)
    assert found == step_by_step(tasks, num_machines)
    best = min(
        max(sum(task for task, at in zip(tasks, places, strict=True) if at == one) for one in range(num_machines))
        for places in product(range(num_machines), repeat=len(tasks))
    )
    assert best <= found <= (2 - 1 / num_machines) * best
    assert max(max(tasks), sum(tasks) / num_machines) <= found <= sum(tasks) / num_machines + max(tasks)


@each("kernel", DIVISIONS)
@each("seed", range(20))
def test_the_formula_is_within_one_block_of_the_schedule(kernel: AttentionKernel, seed: int) -> None:
    rng, division = random.Random(f"{kernel} {seed}"), DIVISIONS[kernel]
    lengths = [rng.choice((rng.randint(1, 60), rng.randint(1, 3000))) for _ in range(rng.randint(1, 12))]
    work = batch(lengths)
    num_heads = SMALL.num_query_heads if division.per_query_head else SMALL.num_heads
    part = max(int(division.longest_part(work, SMALL)), 1)
    blocks = [
        min(part, length - first) for length in lengths for first in range(0, length, part) for _ in range(num_heads)
    ]
    to_keys = SMALL.num_multiprocessors / num_heads
    scheduled = to_keys * list_schedule(blocks, SMALL.num_multiprocessors)
    charged = charged_keys(division, work, SMALL) - division.block_tokens * len(blocks) / num_heads
    assert sum(lengths) <= scheduled
    if division.is_worst_order:
        assert scheduled <= charged
        return
    assert charged - to_keys <= scheduled <= charged + to_keys * part + 1e-6  # a part is a whole number of tokens


def test_many_heads_hide_a_straggler_that_waves_make_everyones() -> None:
    """Short prompts with a long one among twenty, on a model with as many key heads as query heads."""
    rng, on = random.Random(1), accelerator_of(model_shape("opt-2.7b"), 132, 1)
    lengths = [rng.randint(1000, 8000) if number % 20 == 0 else rng.randint(1, 999) for number in range(65)]
    blocks = [length for length in lengths for _ in range(on.num_heads)]
    balanced = sum(blocks) / on.num_multiprocessors
    assert 1.0 <= list_schedule(blocks, on.num_multiprocessors) / balanced < 1.2
    assert charged_keys(DIVISIONS[AttentionKernel.PAGED_V1], batch(lengths), on) == sum(lengths)
    worst = charged_keys(DIVISIONS[AttentionKernel.PAGED_V1_WORST_ORDER], batch(lengths), on)
    assert sum(lengths) < worst < 2 * sum(lengths)
    assert AttentionKernel.ONE_BLOCK_PER_SEQUENCE.num_charged_keys(batch(lengths)) > 6 * sum(lengths)


def test_a_straggler_is_charged_where_few_heads_leave_multiprocessors_idle() -> None:
    """32 contexts of 1 000 tokens and one of 32 000: 64 000 keys, and a block that takes as long as 528 000."""
    work = decodes(32, 1000)
    work.add_decode(32000)
    on = accelerator_of(model_shape("llama-3-8b"), 132, 1)
    charged = {kernel: charged_keys(division, work, on) for kernel, division in DIVISIONS.items()}
    assert charged[AttentionKernel.FLASH_ATTENTION_2] == 32000 * 132 / 8
    assert charged[AttentionKernel.PAGED_V1] == 32000 * 132 / 32
    assert charged[AttentionKernel.FLASHINFER] == 64000  # 264 blocks leave a third of the places to divide it among
    assert 64000 <= charged[AttentionKernel.SECTIONS] < 1.1 * 64000


def test_the_straggler_share_is_the_time_that_equal_lengths_would_save() -> None:
    mixed = decodes(32, 1000)
    mixed.add_decode(32000)
    shares = {
        kernel: straggler_share(
            make_cost_model("roofline", WorkerSpec(LLAMA.model, LLAMA.hardware, kernel=kernel)), mixed
        )
        for kernel in AttentionKernel
    }
    assert shares[AttentionKernel.LOAD_BALANCED] == 0.0
    assert shares[AttentionKernel.FLASH_ATTENTION_2] == pytest.approx(1 - 64000 / 528000, abs=1e-3)
    assert shares[AttentionKernel.PAGED_V1] == pytest.approx(1 - 64000 / 132000, abs=1e-3)
    assert shares[AttentionKernel.ONE_BLOCK_PER_SEQUENCE] > shares[AttentionKernel.FLASH_ATTENTION_2]


@each("kernel", DIVISIONS)
def test_equal_lengths_have_no_straggler(kernel: AttentionKernel) -> None:
    equal, spec = decodes(32, 1000), WorkerSpec(LLAMA.model, LLAMA.hardware, kernel=kernel)
    equal.add_chunk(100, 0, is_last=True)
    equal.swap_out_tokens = 1e9
    assert straggler_share(make_cost_model("roofline", spec), equal) == 0.0
    assert straggler_share(make_cost_model("roofline", spec), decodes(1, 1000)) == 0.0
    assert straggler_share(make_cost_model("roofline", spec), IterationWork()) == 0.0
