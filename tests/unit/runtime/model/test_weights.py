"""Weights from model folders: what loads, and what is refused by name."""

import contextlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.torch import load_file, save_file
from typing_extensions import override

from alignedserve.core.errors import ModelError, UnsafeWeights
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.model.model_files import read_model_config
from alignedserve.runtime.model.weight_files import load_weights
from alignedserve.runtime.model.weights.safetensors_source import SafetensorsSource
from alignedserve.runtime.model.weights.weight_loader import assemble_weights
from alignedserve.runtime.model.weights.weight_source import BlockLookup, WeightSource
from kernels.block_values import unpack_rows
from kernels.grouped_linear import SortedExperts
from lab.profiling.shapes import SHAPES
from tests.support.marks import each
from tests.support.models.tiny_engines import TinyEngine, logits_of, random_tokens, reference_choices, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path, "llama")
    return tmp_path


def load(folder: Path) -> None:
    load_weights(folder, read_model_config(folder), torch.float32)


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace or drop (None) the norm of one layer."""
    tensors = {**load_file(folder / "model.safetensors"), NORM: changes["norm"]}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def test_shards_load_alike(tmp_path: Path) -> None:
    reference = make_tiny_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    tiny = TinyEngine(tiny_decoder(tmp_path))
    prompt = random_tokens(1, 9)
    tiny.add("a", prompt)
    tiny.generate("a", 8)
    assert len(tiny.tokens("a")) == 17
    assert tiny.tokens("a")[9:] == reference_choices(reference, tiny.tokens("a"), 9)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_gemma3_with_images_loads(prefix: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "gemma3_text")
    expected = tiny_decoder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file({**renamed, "vision_tower.patches.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    logits = [logits_of(decoder, random_tokens(1, 9)) for decoder in (expected, tiny_decoder(tmp_path))]
    assert torch.equal(*logits)


class _MetaSource(WeightSource):
    """Shapes alone, on another device than the CPU."""

    @override
    def has(self, name: str) -> bool:
        return name.startswith("model.")

    @override
    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_lie_side_by_side_on_a_gpu(family: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, family)
    config = read_model_config(tmp_path)
    for layer, weights in enumerate(assemble_weights(config, _MetaSource(torch.bfloat16, torch.device("meta"))).layers):
        assert isinstance(weights.mlp, SortedExperts) == (config.experts_of(layer) is not None)
        assert weights.mlp is not None
        assert weights.mlp(torch.empty(7, 64, dtype=torch.bfloat16, device="meta")).shape == (7, 64)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickled_weights_are_refused(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(UnsafeWeights, match=name):
        load(folder)


@pytest.mark.parametrize("kept", [0.0, 0.00001, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_named(folder: Path, kept: float) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or not"):
        load(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, norm=None)
    with pytest.raises(ModelError, match=NORM):
        load(folder)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    rewrite(folder, norm=torch.zeros(65))
    with pytest.raises(ModelError, match=rf"{NORM} has shape \[65\], expected \[64\]"):
        load(folder)


class _ReadWhole(SafetensorsSource):
    @override
    def file_rows(self, name: str, shape: tuple[int, int]) -> None:
        return None


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "gemma3_text", "mixtral", "phi3", "opt"])
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_packed_from_files_are_those_of_the_tensors(
    dtype: torch.dtype, quantization: str | None, family: str, tmp_path: Path
) -> None:
    make_tiny_model(tmp_path, family)
    config = read_model_config(tmp_path)
    source = _ReadWhole(tmp_path, dtype, torch.device("cpu"))
    both = (
        load_weights(tmp_path, config, dtype, quantization=quantization),
        assemble_weights(config, source, quantization),
    )
    logits = [logits_of(Decoder(config, weights), random_tokens(1, 9)) for weights in both]
    assert torch.equal(*logits)


def test_a_file_that_becomes_shorter_while_it_is_read_is_named(folder: Path) -> None:
    config = read_model_config(folder)
    path = folder / "model.safetensors"
    for dtype in (torch.float32, torch.bfloat16):
        content = path.read_bytes()
        source = SafetensorsSource(folder, dtype, torch.device("cpu"))
        assert source.tensor(NORM, (64,)).dtype == dtype
        path.write_bytes(content[: len(content) // 9])
        with pytest.raises(ModelError, match=r"model\.safetensors.* cannot be read"):
            assemble_weights(config, source)
        path.write_bytes(content)


def test_a_header_that_changes_behind_the_check_is_an_error_at_worst(folder: Path) -> None:
    config = read_model_config(folder)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    generator = random.Random(0)
    for _ in range(100):
        source = SafetensorsSource(folder, torch.float32, torch.device("cpu"))
        changed = content.copy()
        for _ in range(generator.randint(1, 4)):
            changed[generator.randrange(8 + length)] = generator.choice(b'0123456789,:[]{}"x\xff')
        path.write_bytes(changed)
        with contextlib.suppress(ModelError):
            assemble_weights(config, source)
        path.write_bytes(content)


def test_numbers_that_8_bits_cannot_hold_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.mlp.down_proj.weight"][3, 4] = float("inf")
    save_file(tensors, path)
    with pytest.raises(
        ModelError, match=r"layers\.2\.mlp\.down_proj cannot be packed with 8 bits: .* not finite; leave"
    ):
        load_weights(folder, read_model_config(folder), torch.float32, quantization="int8")


@pytest.mark.parametrize(
    ("weight_map", "problem"),
    [
        ({NORM: "../model.safetensors"}, "not the name"),
        ({NORM: "/etc/passwd"}, "not the name"),
        ({NORM: "pytorch_model.bin"}, "not the name"),
        ({NORM: 3}, "not the name"),
        ({NORM: "absent.safetensors"}, "is missing"),
        ({"model.nowhere": "first.safetensors"}, "does not hold tensor model.nowhere"),
        ({}, "weight_map"),
        ([], "weight_map"),
    ],
)
def test_bad_indexes(folder: Path, weight_map: Any, problem: str) -> None:
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=problem):
        load(folder)


def test_random_weights_are_the_same_for_the_same_seed() -> None:
    small = replace(SHAPES["opt-125m"], num_layers=1, vocab_size=500)
    rows = torch.arange(500)
    first, second, other = (
        load_weights(None, small, torch.bfloat16, seed=seed).embedding.index_select(0, rows) for seed in (3, 3, 4)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@each("type_name", ["Q8_0", "Q4_0", "Q4_1"])
@each("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_blocks_are_those_of_the_unpacked_matrix(type_name: str, dtype: torch.dtype) -> None:
    values = np.random.default_rng(0).normal(size=(40, 64)).astype(np.float32)
    raw = np.ascontiguousarray(quantize(values, GGMLQuantizationType[type_name]))
    whole = torch.from_numpy(unpack_rows(raw, type_name)).to(dtype)
    lookup = BlockLookup(torch.from_numpy(raw), type_name, 64, dtype)
    for chosen in ([39, 0, 7, 7], [5], []):
        index = torch.tensor(chosen, dtype=torch.int64)
        assert torch.equal(lookup.index_select(0, index), whole.index_select(0, index))
