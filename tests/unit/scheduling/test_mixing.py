"""Contexts that are cheaper beside those that run, decided by the kernel's costs alone."""

import pytest

from alignedserve.costmodel.attention_kernel import AttentionKernel
from alignedserve.costmodel.choice import WorkerSpec, make_cost_model
from alignedserve.scheduling.iteration_scheduler import PolicyIterationScheduler
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policy import IterationLimits
from alignedserve.scheduling.scheduler_state import Scheduler
from tests.support.samples import request


def scheduler(kernel: AttentionKernel) -> PolicyIterationScheduler:
    """Forty decodes of about 500 tokens on an H100."""
    costs = make_cost_model("roofline", WorkerSpec("opt-6.7b", "h100", kernel=kernel))
    made = PolicyIterationScheduler(Scheduler(make_policy("aligned_slo"), costs, IterationLimits(256, 8192)))
    for number in range(40):
        known = request(f"r{number}", prompt_len=480 + number)
        made.enter(known, 0.0, num_cached=known.prompt_len, num_generated=1, predicted_len=None)
    return made


@pytest.mark.parametrize("context_len", [50, 500, 8000])
def test_any_length_mixes_where_attention_costs_the_sum(context_len: int) -> None:
    assert scheduler(AttentionKernel.LOAD_BALANCED).is_mixing_cheaper([context_len] * 40)


@pytest.mark.parametrize(("context_len", "is_worth"), [(50, False), (500, True), (520, True), (8000, False)])
def test_only_like_lengths_mix_where_the_longest_is_a_straggler(context_len: int, *, is_worth: bool) -> None:
    made = scheduler(AttentionKernel.ONE_BLOCK_PER_SEQUENCE)
    assert made.is_mixing_cheaper([context_len] * 40) == is_worth


def test_a_batch_with_a_straggler_of_its_own_is_not_added_to_another_one() -> None:
    made = scheduler(AttentionKernel.ONE_BLOCK_PER_SEQUENCE)
    straggler = request("straggler", prompt_len=5000)
    made.enter(straggler, 0.0, num_cached=5000, num_generated=1, predicted_len=None)
    assert not made.is_mixing_cheaper([500] * 40)
    assert not made.is_mixing_cheaper([500] * 39 + [5100])
