"""Which layers a stage has, how steps are cut into parts, and what is refused."""

from dataclasses import replace

import pytest

from alignedserve.core.errors import ConfigError
from alignedserve.core.ids import RequestId
from alignedserve.runtime.device.cores import num_cores
from alignedserve.runtime.device.devices import check_ranks
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.named_models import pocket_folder
from alignedserve.runtime.model.sharding.layer_stages import check_pipeline_parallel, layer_stages
from plugins.stages.group_choice import GroupChoice
from plugins.stages.step_parts import step_parts


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return replace(read_config(pocket_folder()), num_layers=8)


def spans(config: ModelConfig, size: int) -> list[tuple[int, int]]:
    return [(stage.first, stage.end) for stage in layer_stages(config, size)]


def test_the_head_counts_as_layers_do(config: ModelConfig) -> None:
    layer = replace(config, vocab_size=1).num_projected // 8
    light = replace(config, vocab_size=1)
    heavy = replace(config, vocab_size=4 * layer // config.hidden_size)
    assert spans(light, 2) == [(0, 4), (4, 8)]
    assert spans(heavy, 2) == [(0, 2), (2, 8)]
    assert spans(light, 3) == [(0, 2), (2, 5), (5, 8)]
    assert spans(light, 8) == [(layer, layer + 1) for layer in range(8)]


def test_what_layers_are_is_renumbered(config: ModelConfig) -> None:
    own = layer_stages(replace(config, windowed_layers=(0, 3, 5), unrotated_layers=(4,)), 2)[1]
    local = own.local(replace(config, windowed_layers=(0, 3, 5), unrotated_layers=(4,)))
    assert local.num_layers == own.end - own.first
    assert local.windowed_layers == tuple(layer - own.first for layer in (3, 5) if layer >= own.first)
    assert local.unrotated_layers == (4 - own.first,)


@pytest.mark.parametrize(
    ("size", "tensor_parallel", "device", "message"),
    [
        (9, 1, "cpu", "the model's 8 layers make at most 8 stages"),
        (2, 2, "cpu", "ranks of a worker share all its layers or have some each; set one of them to 1"),
        (2, 1, "cuda:0", "stages are computed on CPUs alone, not on cuda:0"),
    ],
)
def test_what_stages_cannot_do_is_refused(
    config: ModelConfig, size: int, tensor_parallel: int, device: str, message: str
) -> None:
    check_pipeline_parallel(config, 1, tensor_parallel, device)
    with pytest.raises(ConfigError, match=message):
        check_pipeline_parallel(config, size, tensor_parallel, device)


def test_more_stages_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"{num_cores()} cores; set it lower, or serve on as many hosts"):
        check_ranks("cpu", 1, num_cores() + 1)


def decodes(*names: str) -> list[tuple[RequestId, int]]:
    return [(RequestId(name), 1) for name in names]


def test_decodes_are_cut_into_groups_that_go_round() -> None:
    assert step_parts(decodes(*"abcdefgh"), [], 2) == [decodes(*"abcd"), decodes(*"efgh")]
    assert step_parts(decodes(*"efgh"), [4], 2) == [decodes(*"efgh")]
    assert step_parts(decodes(*"aefgh"), [3], 2) == [decodes("a"), decodes(*"efgh")]  # a was not ahead
    assert step_parts(decodes("a"), [], 2) == [decodes("a")]
    assert step_parts([], [4], 2) == []


def test_prompts_are_cut_into_pieces_behind_what_decodes() -> None:
    prompt = RequestId("prompt")
    assert step_parts([(prompt, 250), *decodes("a", "b")], [], 2) == [
        [*decodes("a", "b"), (prompt, 82)],
        [(prompt, 84)],
        [(prompt, 84)],
    ]
    assert step_parts([(prompt, 250)], [], 2, lambda _: True) == [[(prompt, 250)]]
    assert step_parts([(prompt, 40)], [], 2) == [[(prompt, 40)]]
    assert len(step_parts([(prompt, 5000)], [], 2)) == 8


@pytest.mark.parametrize("seconds", [{True: 1.0, False: 2.0}, {True: 2.0, False: 1.0}])
def test_the_quicker_way_is_kept_and_tried_again(seconds: dict[bool, float]) -> None:
    choice, ways = GroupChoice(), list[bool]()
    for _ in range(2000):
        ways.append(choice.is_grouped(8))
        choice.note(8, seconds[ways[-1]])
    quicker = min(seconds, key=seconds.__getitem__)
    assert ways.count(quicker) > 1850
    assert ways[-500:].count(not quicker) < 60  # it is tried now and then
    assert not choice.is_grouped(1)
