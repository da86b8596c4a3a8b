"""Folders with quantised matrices: their sizes, shards, and what is refused."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.errors import ModelError
from alignedserve.runtime.model.model_files import quantized_weights
from alignedserve.runtime.model.quantized.layout import Computing
from alignedserve.runtime.model.served_model import ServedModel, resolve_model
from benchmarks.engine.throughput import weight_bytes
from tests.support.models.quantized_checkpoints import FORMATS, quantize_folder
from tests.support.models.tiny_engines import logits_of, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

MODULE = "model.layers.1.self_attn.k_proj."
TOKENS = random_tokens(1, 9)


def made(folder: Path, name: str, family: str = "llama") -> Path:
    make_tiny_model(folder, family)
    quantize_folder(folder, FORMATS[name])
    return folder


def changed(folder: Path, **parts: Tensor | None) -> Path:
    """Replace or drop (None) tensors of one module."""
    tensors: dict[str, Tensor | None] = {**load_file(folder / "model.safetensors")}
    tensors |= {MODULE + name: part for name, part in parts.items()}
    save_file({name: part for name, part in tensors.items() if part is not None}, folder / "model.safetensors")
    return folder


def resolved(folder: Path, dtype: str = "bfloat16", **options: Any) -> ServedModel:
    return resolve_model(ModelSectionConfig(path=str(folder), dtype=dtype, **options))


def test_sizes_count_packed_weights(tmp_path: Path) -> None:
    served = resolved(made(tmp_path, "gptq"))
    assert served.stored is not None
    rest = served.config.loaded_weight_bytes("bfloat16")
    config = served.decoder
    attention = config.hidden_size * (2 * config.query_width + 2 * config.kv_width)
    in_layers = config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    assert served.weight_bytes == rest - 2 * in_layers + in_layers * 18 // 32
    head = served.config.vocab_size * served.config.hidden_size
    assert served.stored.step_bytes == pytest.approx(in_layers * 18 // 32 + 2 * head, rel=0.02)  # and norms
    assert served.stored.description == "gptq, int4 in groups of 32 (21 matrices); multiplied in blocks of 4 bits (21)"
    assert served.stored.warning is None
    assert served.stored.unpacking_bytes == 0
    on_gpu = quantized_weights(tmp_path, served.decoder, Computing("cuda", "bfloat16"))
    widest = served.decoder.intermediate_size * served.decoder.hidden_size
    assert on_gpu.unpacking_bytes == 2 * 2 * widest  # gates and ups, of bfloat16
    assert resolved(tmp_path, random_weights=True).stored is None
    int8 = resolved(tmp_path, quantization="int8")
    assert int8.weight_bytes == int8.config.loaded_weight_bytes("bfloat16", "int8")
    assert "packed again as int8" in str(int8.stored)


def test_a_warning_says_what_unpacking_costs(tmp_path: Path) -> None:
    stored = resolved(made(tmp_path, "fp8")).stored
    assert stored is not None
    assert stored.warning == "21 matrices unpacked to bfloat16 (float8): 0 MiB instead of 0"
    assert stored.description.endswith(stored.warning)


def test_more_matrices_than_tensors_are_refused(tmp_path: Path) -> None:
    config = json.loads((made(tmp_path, "awq") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1000}))
    with pytest.raises(ModelError, match="more matrices than the files have tensors"):
        resolved(tmp_path)


def test_matrices_that_are_not_quantised_stay_plain(tmp_path: Path) -> None:
    """Queries in blocks, keys and values in floats: one product of several kinds."""
    make_tiny_model(tmp_path, "llama")
    plain = logits_of(tiny_decoder(tmp_path), TOKENS)
    quantize_folder(tmp_path, FORMATS["w8a16"], lambda name: "q_proj" in name or "gate_proj" in name)
    stored = resolved(tmp_path).stored
    assert stored is not None
    assert "(6 matrices)" in stored.description
    assert float((logits_of(tiny_decoder(tmp_path), TOKENS) - plain).norm() / plain.norm()) < 0.03


def test_shards_and_quantised_heads(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    quantize_folder(tmp_path, FORMATS["awq by row"], lambda name: "proj" in name)
    before = logits_of(tiny_decoder(tmp_path), TOKENS)
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}  # scales beside other words
    for shard, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / shard)
    (tmp_path / "model.safetensors").unlink()
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits_of(tiny_decoder(tmp_path), TOKENS), before)


def test_the_engine_benchmark_counts_packed_weights(tmp_path: Path) -> None:
    served = resolved(made(tmp_path, "awq"), "float32")
    assert served.stored is not None
    counted = weight_bytes(served.decoder, str(tmp_path), "float32")
    assert counted == (served.weight_bytes, served.stored.step_bytes)
    assert counted.step_bytes < 4 * served.decoder.num_multiplied


INT = torch.int32
BAD: list[tuple[str, dict[str, Tensor | None], str]] = [
    ("nvfp4", {"weight_global_scale": torch.zeros(1)}, "weight_global_scale holds numbers that are not finite"),
    ("nvfp4", {"weight_global_scale": None}, "weight_global_scale is missing"),
    ("gptq", {"scales": None}, "scales is missing"),
    ("gptq", {"scales": torch.full((2, 32), float("nan"))}, "scales holds numbers that are not finite"),
    ("gptq", {"scales": torch.ones(1, 32)}, r"scales has shape \[1, 32\], expected \[2, 32\]"),
    ("gptq", {"qweight": torch.zeros(8, 33, dtype=INT)}, r"qweight has shape \[8, 33\], expected \[8, 32\]"),
    ("gptq", {"qweight": None, "weight": None}, "k_proj.weight is in none of"),
    ("gptq", {"g_idx": torch.full((64,), 2, dtype=INT)}, "g_idx holds groups that are not in 0 to 1"),
    ("w8a8", {"weight": torch.zeros(32, 64, dtype=torch.uint8)}, "weight has dtype U8, expected I8"),
    ("w8a8", {"weight": torch.zeros(32, 64)}, "is F32 and has scales: the checkpoint is not compressed"),
    ("w4a16 in groups", {"weight_shape": torch.tensor([64, 64])}, r"weight_shape is \[64, 64\], expected \[32, 64\]"),
    ("fp8", {"weight": torch.full((32, 64), 500.0).to(torch.float8_e5m2)}, "dtype F8_E5M2, expected F8_E4M3"),
    ("fp8", {"weight": torch.full((32, 64), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)}, "not finite"),
    ("fp8 in blocks", {"weight_scale_inv": torch.ones(1, 3)}, r"scale_inv has shape \[1, 3\], expected \[1, 2\]"),
]


@pytest.mark.parametrize(("name", "parts", "problem"), BAD, ids=[f"{name}, {problem}" for name, _, problem in BAD])
def test_what_does_not_fit_is_named(name: str, parts: dict[str, Tensor | None], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=problem):
        tiny_decoder(changed(made(tmp_path, name), **parts))


def test_numbers_of_more_bits_are_refused(tmp_path: Path) -> None:
    folder = made(tmp_path, "w8a8")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 4
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="holds numbers of more than 4 bits"):
        tiny_decoder(folder)


def test_quantised_tensors_without_a_config(tmp_path: Path) -> None:
    folder = made(tmp_path, "gptq")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"q_proj.qweight is there, but config.json has no quantization_config"):
        tiny_decoder(folder)


@pytest.mark.slow
def test_random_bytes_in_quantised_tensors_never_crash(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    folder = made(tmp_path, "gptq desc_act")
    original = (folder / "model.safetensors").read_bytes()
    for _ in range(200):
        tensors = load_file(folder / "model.safetensors")
        for suffix in ("qweight", "qzeros", "scales", "g_idx"):
            if float(torch.rand((), generator=generator)) < 0.4:
                raw = tensors[MODULE + suffix].view(torch.uint8)
                raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))
        save_file(tensors, folder / "model.safetensors")
        with contextlib.suppress(ModelError):
            logits_of(tiny_decoder(folder), TOKENS)
        (folder / "model.safetensors").write_bytes(original)
