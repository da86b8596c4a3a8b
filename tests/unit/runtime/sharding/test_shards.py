"""Which part of a model a rank has, what is refused, and what is read of files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from alignedserve.core.errors import ConfigError
from alignedserve.runtime.device.cores import num_cores
from alignedserve.runtime.device.devices import check_ranks, rank_devices
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.sharding.regions import Region, tensor_region
from alignedserve.runtime.model.sharding.tensor_shard import Span, TensorShard, check_tensor_parallel
from alignedserve.runtime.model.weights import safetensors_source
from alignedserve.runtime.model.weights.packed_products import GroupedRows
from alignedserve.runtime.model.weights.safetensors_source import SafetensorsSource
from alignedserve.runtime.model.weights.weight_source import packed_region
from kernels.grouped_linear import GroupedWeight, Numbers
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
