"""Decodes with adapters through all layers in one call of the native kernels: the same bits as layer by layer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.forward.forward_batch import ForwardBatch
from alignedserve.runtime.engine.forward.native_pass import NativePass
from alignedserve.runtime.lora.adapter_config import read_adapter_files
from alignedserve.runtime.lora.adapter_weights import load_adapter
from kernels.adapters.lora import AdapterMatrices
from kernels.cpu.decode_pass import decode_pass_available
from tests.support.models.lora_folders import LLAMA_TARGETS, write_adapter
from tests.support.models.tiny_engines import LogitsProbe, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(not decode_pass_available(), reason="the native kernels are not built")

FAMILIES = {
    "llama": LLAMA_TARGETS,
    "qwen3": LLAMA_TARGETS,
    "gemma3_text": LLAMA_TARGETS,
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
}


def adapters_of(decoder: Decoder, reference: Any, folder: Path, *targets: tuple[str, ...]) -> list[AdapterMatrices]:
    loaded = []
    for seed, own in enumerate(targets):
        write_adapter(folder / str(seed), reference, seed=seed, targets=own, rank=3 + 17 * seed)
        files = read_adapter_files(folder / str(seed), 1 << 30)
        loaded.append(load_adapter(files, decoder.config, decoder.dtype, decoder.device, max_rank=64))
    return loaded


def logits_of(decoder: Decoder, adapters: list[AdapterMatrices]) -> torch.Tensor:
    """Return logits of decodes with and without adapters, of which some come to their end earlier."""
    probe = LogitsProbe(decoder)
    lengths = {"first": 20, "none": 23, "second": 27, "again": 22, "other": 21}
    own = {"first": adapters[0], "second": adapters[1], "again": adapters[0], "other": adapters[2]}
    for seed, (name, count) in enumerate(lengths.items()):
        probe.add(name, random_tokens(seed, count, 128), adapter=own.get(name))
    probe.step(**dict.fromkeys(lengths, 17))
    for step in range(10):
        probe.step(**{name: 1 for name, count in lengths.items() if step < count - 17})
    return torch.cat([probe.logits(name) for name in lengths])


def in_one_call_and_by_layers(
    decoder: Decoder, adapters: list[AdapterMatrices], monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, torch.Tensor]:
    suited: list[bool] = []
    suits = NativePass.suits

    def noted(self: NativePass, batch: ForwardBatch) -> bool:
        suited.append(suits(self, batch))
        return suited[-1]

    monkeypatch.setattr(NativePass, "suits", noted)
    fused = logits_of(decoder, adapters)
    assert suited == [False] + [True] * 10, "the prompts alone go layer by layer"
    monkeypatch.setattr(NativePass, "suits", lambda self, batch: False)
    return fused, logits_of(decoder, adapters)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [("llama", "bfloat16", None), ("llama", "float32", "int8"), *((family, "float32", None) for family in FAMILIES)],
)
def test_same_bits_as_layer_by_layer(
    family: str,
    dtype: str,
    quantization: str | None,
    threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = make_tiny_model(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text())
    if "query_pre_attn_scalar" in config:  # other models scale queries apart, and go layer by layer
        (tmp_path / "config.json").write_text(json.dumps({**config, "query_pre_attn_scalar": config["head_dim"]}))
    decoder = tiny_decoder(tmp_path, dtype, quantization)
    targets = FAMILIES[family]
    adapters = adapters_of(decoder, reference, tmp_path / "adapters", targets, targets[-2:], targets[:1])
    torch.set_num_threads(threads)
    try:
        fused, separate = in_one_call_and_by_layers(decoder, adapters, monkeypatch)
    finally:
        torch.set_num_threads(1)
    assert fused.isfinite().all()
    assert torch.equal(fused, separate)
