"""Processes that share experts: what each has in memory, what they exchange, and what is gained."""

from dataclasses import replace

import pytest

from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.hardware import LinkModel
from alignedserve.costmodel.linear import LinearCoefficients, LinearIterationModel
from alignedserve.costmodel.model_shapes import ModelShape
from alignedserve.costmodel.work import IterationWork
from lab.costmodel.shared_experts import ExpertSharing

SHAPE = ModelShape(
    "mixture", 4, 64, 4, 4, 16, 0, 512, is_gated=True, ties_embeddings=True, dtype="float32",
    num_experts=6, num_chosen_experts=2, expert_size=128, num_expert_layers=4,
)  # fmt: skip
COSTS = LinearCoefficients(base_s=0.02, prompt_token_s=1e-4, decode_s=1e-4, context_token_s=1e-7)


def test_each_expert_is_in_one_process_and_all_else_in_the_first() -> None:
    expert_bytes = 4 * 3 * 64 * 128 * 4  # of one expert on all layers
    for size in (2, 3, 4):
        memory = ExpertSharing(SHAPE, size).memory_bytes
        assert sum(memory) == SHAPE.weight_bytes
        assert memory[0] > SHAPE.weight_bytes - 6 * expert_bytes
        assert all(part % expert_bytes == 0 for part in memory[1:])
    assert ExpertSharing(SHAPE, 4).memory_bytes[1:] == [2 * expert_bytes, expert_bytes, 2 * expert_bytes]


def test_rows_of_chosen_experts_travel_there_and_back() -> None:
    sharing = ExpertSharing(SHAPE, 2, LinkModel(1e-4, 1e6))
    row_bytes = 64 * 4
    assert sharing.layer_s(10) == pytest.approx(1e-4 + 10 * 2 * (2 * 0.5) * row_bytes / 1e6)
    assert sharing.exchange_s(10) == pytest.approx(4 * sharing.layer_s(10))


def test_an_iteration_takes_less_but_never_less_than_what_is_not_shared() -> None:
    work = IterationWork()
    work.add_decodes(16, 16 * 100, 100)
    alone = LinearIterationModel(COSTS).iteration_s(work)
    free, last = LinkModel(0.0, 1e15), alone
    for size in (2, 3, 6):
        shared_s = LinearIterationModel(ExpertSharing(SHAPE, size, free).shared(COSTS)).iteration_s(work)
        assert alone * SHAPE.dense_parameters / SHAPE.layer_parameters < shared_s < last
        last = shared_s
    slow = ExpertSharing(SHAPE, 2, LinkModel(0.1, 1e6)).shared(COSTS)
    assert LinearIterationModel(slow).iteration_s(work) > alone + 4 * 0.1 - COSTS.base_s


def test_a_token_does_not_choose_evenly() -> None:
    sharing = ExpertSharing(SHAPE, 2)
    assert 0.65 < sharing.busiest_share(1) < 0.8  # of two experts both are in one process as often as not
    assert sharing.busiest_share(1000) == pytest.approx(0.5)


def test_where_they_cannot_be_shared() -> None:
    with pytest.raises(ConfigError, match="mixture has 6 experts, whole in one process each"):
        ExpertSharing(SHAPE, 7).check()
    with pytest.raises(ConfigError, match=r"2 processes of 3 threads .* has 4 cores"):
        ExpertSharing(SHAPE, 2).check(3, 4)
    with pytest.raises(ConfigError, match="no experts"):
        ExpertSharing(replace(SHAPE, num_expert_layers=0), 2).check()
