"""Which part of a model a rank has, what is refused, and what is read of files."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.errors import ConfigError
from alignedserve.core.ids import RequestId
from alignedserve.runtime.device.cores import num_cores
from alignedserve.runtime.device.devices import check_ranks, rank_devices
from alignedserve.runtime.engine.engine_sizes import EngineSizes
from alignedserve.runtime.engine.steps.step_passes import graph_sizes
from alignedserve.runtime.engine.worker_engine import rank_spec_of
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.named_models import pocket_folder
from alignedserve.runtime.model.served_model import resolve_model
from alignedserve.runtime.model.sharding.layer_stages import check_pipeline_parallel, layer_stages
from alignedserve.runtime.model.sharding.regions import Region, tensor_region
from alignedserve.runtime.model.sharding.tensor_shard import Span, TensorShard, check_tensor_parallel
from alignedserve.runtime.model.weights import safetensors_source
from alignedserve.runtime.model.weights.packed_products import GroupedRows
from alignedserve.runtime.model.weights.safetensors_source import SafetensorsSource
from alignedserve.runtime.model.weights.weight_source import packed_region
from kernels.grouped_linear import GroupedWeight, Numbers
from plugins.stages.group_choice import GroupChoice
from plugins.stages.step_parts import step_parts
from tests.support.models.tiny_models import make_tiny_model


def test_heads_that_do_not_divide_are_refused_with_what_would_fit(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen3")
    config = read_config(tmp_path)
    with pytest.raises(ConfigError, match=r"6 attention heads cannot be divided among 4 ranks; .* 1 or 2 or 6$"):
        check_tensor_parallel(config, 4)
    with pytest.raises(ConfigError, match="2 key heads can be neither divided among 3 ranks"):
        check_tensor_parallel(config, 3)
    check_tensor_parallel(config, 6)


def test_key_heads_that_are_fewer_than_ranks_are_shared_evenly(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen3")
    config = read_config(tmp_path)
    assert [TensorShard(rank, 6).kv_heads(config) for rank in range(6)] == [Span(0, 1)] * 3 + [Span(1, 2)] * 3
    assert [TensorShard(rank, 2).kv_heads(config) for rank in range(2)] == [Span(0, 1), Span(1, 2)]


@pytest.mark.parametrize(
    ("width", "spans"),
    [
        (3072, [(0, 1536), (1536, 3072)]),
        (11008, [(0, 21 * 256), (21 * 256, 11008)]),  # blocks of 256 stay whole: 43 of them
        (640, [(0, 320), (320, 640)]),
        (97, [(0, 48), (48, 97)]),
    ],
)
def test_inner_columns_are_divided_between_blocks(width: int, spans: list[tuple[int, int]]) -> None:
    assert [tuple(TensorShard(rank, 2).inner(width)) for rank in range(2)] == spans


def test_more_ranks_than_cores_are_refused() -> None:
    check_ranks("cpu", 1)
    with pytest.raises(ConfigError, match=f"this machine has {num_cores()} cores; set it lower"):
        check_ranks("cpu", num_cores() + 1)


def test_ranks_have_neighbouring_gpus() -> None:
    assert rank_devices("cuda:2", 3) == ("cuda:2", "cuda:3", "cuda:4")
    assert rank_devices("cpu", 2) == ("cpu", "cpu")


@pytest.mark.parametrize(
    "region",
    [
        Region(10, 6, (Span(2, 9),)),
        Region(10, 6, (Span(0, 2), Span(7, 10))),
        Region(10, 6, (Span(0, 10),), Span(2, 5)),
    ],
)
def test_a_part_of_a_file_is_read_alone(region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_source, "_PIECE_BYTES", 48)  # two rows at a time
    whole = torch.randn(10, 6)
    save_file({"weight": whole}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path, torch.float32, torch.device("cpu"))
    assert torch.equal(source.region("weight", region), tensor_region(whole, region))


def drawn_weight(numbers: Numbers) -> GroupedWeight:
    """Of 10 columns and 128 inputs in groups of 32, or of 16."""
    words = torch.randint(0, 0x77, (10, numbers.num_bytes(128)), dtype=torch.uint8)
    if numbers is Numbers.MXFP4:
        return GroupedWeight(numbers, words, torch.randint(110, 130, (10, 4), dtype=torch.uint8), None)
    if numbers is Numbers.NVFP4:
        return GroupedWeight(
            numbers, words, torch.randint(0x20, 0x50, (10, 8), dtype=torch.uint8), None, torch.rand(10)
        )
    zeros = torch.randint(0, 16, (10, 4), dtype=torch.uint8) if numbers.are_whole else None
    return GroupedWeight(numbers, words, torch.rand(10, 4), zeros)


@pytest.mark.parametrize("numbers", list(Numbers))
def test_a_part_of_a_weight_in_groups_has_the_same_values(numbers: Numbers) -> None:
    whole = GroupedRows(drawn_weight(numbers))
    region = Region(10, 128, (Span(2, 9),), Span(32, 96))
    part = packed_region(whole, region)
    assert isinstance(part, GroupedRows)
    values = whole.weight.unpacked(torch.float32)
    assert torch.equal(part.weight.unpacked(torch.float32), tensor_region(values, region))
    assert packed_region(whole, region._replace(columns=Span(16, 96))) is None  # within a group


# Which layers a stage has, how steps are cut into parts, and what is refused.


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


# What a worker's ranks are told of the first one's engine.


def test_all_ranks_record_graphs_of_the_same_batches_where_a_worker_holds_more_than_it_computes() -> None:
    served = replace(resolve_model(ModelSectionConfig()), tensor_parallel=2)
    sizes = EngineSizes(1 << 20, max_sequences=1088, block_size=16, max_running=50)
    told = rank_spec_of(served, sizes, num_blocks=4).engine_options
    assert graph_sizes(told.most_running) == graph_sizes(sizes.most_running)
