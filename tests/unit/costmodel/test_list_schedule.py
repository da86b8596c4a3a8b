"""Decode attention as a list schedule, against schedules that are found by trying everything."""

import random
from itertools import product

import pytest

from alignedserve.costmodel.model import AttentionKernel
from alignedserve.costmodel.model_shapes import model_shape
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
