"""Sequences with LoRA adapters: as the model with merged weights in transformers, the same bits in any batch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.core.ids import RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.forward.forward_batch import ForwardBatch
from alignedserve.runtime.engine.forward.native_pass import NativePass
from alignedserve.runtime.lora.adapter_check import read_adapter_files
from alignedserve.runtime.lora.adapter_weights import load_adapter
from kernels.cpu.decode_pass import decode_pass_available
from kernels.lora import AdapterMatrices
from tests.support.devices.checked_streams import CheckedStreams
from tests.support.models.lora_folders import LLAMA_TARGETS, merge, write_adapter
from tests.support.models.tiny_engines import LogitsProbe, TinyEngine, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

OPT_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
NEOX_TARGETS = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
PHI3_TARGETS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PROMPT = random_tokens(5, 40)


def adapter_of(decoder: Decoder, folder: Path) -> AdapterMatrices:
    files = read_adapter_files(folder, 1 << 30)
    return load_adapter(files, decoder.config, decoder.dtype, decoder.device, max_rank=64)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", LLAMA_TARGETS),
        ("llama_mha", LLAMA_TARGETS),
        ("llama", ("q_proj", "v_proj")),
        ("llama", ("up_proj",)),
        ("qwen3", LLAMA_TARGETS),
        ("gemma3_text", LLAMA_TARGETS),
        ("mixtral", ATTENTION),
        ("opt", OPT_TARGETS),
        ("gpt_neox", NEOX_TARGETS),
        ("phi3", PHI3_TARGETS),
    ],
)
def test_logits_are_those_of_the_merged_weights(family: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    reference = make_tiny_model(tmp_path, family)
    matrices = write_adapter(tmp_path / "adapter", reference, targets=targets, rank=6)
    decoder = tiny_decoder(tmp_path)
    probe = LogitsProbe(decoder)
    probe.add("adapted", PROMPT, adapter=adapter_of(decoder, tmp_path / "adapter"))
    probe.add("base", PROMPT)
    probe.step(base=17, adapted=9)
    probe.step(base=23, adapted=30)
    probe.step(adapted=1)
    exact = reference if family == "mixtral" else reference.double()  # its experts are not computed in float64
    assert_close(probe.logits("base"), exact)
    merge(exact, tmp_path / "adapter", matrices)
    assert_close(probe.logits("adapted"), exact)


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2, "down_proj": 9}, "alpha_pattern": {"layers.1.mlp.up_proj": 1.5}},
        {"target_modules": r".*\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj"},
        {"target_modules": "all-linear"},
    ],
)
def test_scales_and_ranks_are_those_of_peft(options: dict[str, Any], tmp_path: Path) -> None:
    reference = make_tiny_model(tmp_path, "llama")
    matrices = write_adapter(tmp_path / "adapter", reference, **options)
    decoder = tiny_decoder(tmp_path)
    probe = LogitsProbe(decoder)
    probe.add("adapted", PROMPT, adapter=adapter_of(decoder, tmp_path / "adapter"))
    probe.step(adapted=40)
    merge(exact := reference.double(), tmp_path / "adapter", matrices)
    assert_close(probe.logits("adapted"), exact)


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", None), ("bfloat16", None), ("float32", "int8"), ("bfloat16", "int8")]
)
def test_answers_are_the_same_bits_alone_and_in_any_batch(dtype: str, quantization: str | None, tmp_path: Path) -> None:
    reference = make_tiny_model(tmp_path, "llama")
    decoder = tiny_decoder(tmp_path, dtype, quantization)
    for seed, targets in ((1, LLAMA_TARGETS), (2, ("q_proj", "gate_proj"))):
        write_adapter(tmp_path / str(seed), reference, seed=seed, targets=targets)
    adapters = [None, *(adapter_of(decoder, tmp_path / str(seed)) for seed in (1, 2))]
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=60, num_logprobs=2)
    alone = []
    for adapter in adapters:
        engine = TinyEngine(decoder)
        engine.add("alone", PROMPT, sampling, adapter=adapter)
        alone.append([(token.token_id, token.logprob) for token in engine.generate("alone", 10)])
    engine = TinyEngine(decoder, seed=7)
    for number, adapter in enumerate((*adapters, adapters[1])):
        engine.add(str(number), PROMPT, sampling, adapter=adapter)
    sampled: dict[str, list[Any]] = {str(number): [] for number in range(4)}
    pieces = {"0": [40], "1": [3, 37], "2": [20, 20], "3": [39, 1]}
    while any(len(tokens) < 10 for tokens in sampled.values()):
        slices = {name: (left.pop(0) if left else 1) for name, left in pieces.items() if len(sampled[name]) < 10}
        for token in engine.step(**slices).sampled:
            sampled[token.request_id].append((token.token_id, token.logprob))
    assert [sampled[name] for name in "0123"] == [*alone, alone[1]]


def assert_close(logits: torch.Tensor, exact: Any) -> None:
    """Compare with the model in float64."""
    with torch.inference_mode():
        wanted = exact(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits.double(), wanted.double(), rtol=2e-3, atol=2e-3)


def test_sequences_with_adapters_get_the_same_tokens_from_steps_that_are_launched_ahead(tmp_path: Path) -> None:
    """One of them ends early, and its adapter with it, while a step is computed that nobody will ask for."""
    reference = make_tiny_model(tmp_path, "llama")
    decoder = tiny_decoder(tmp_path)
    for seed in (1, 2):
        write_adapter(tmp_path / f"adapter-{seed}", reference, seed=seed)
    made = {"a": 1, "b": 2, "c": 0}
    plain, ahead = TinyEngine(decoder), TinyEngine(decoder, launches_ahead=True, streams=CheckedStreams(3), num_lent=3)
    for tiny in (plain, ahead):
        for name, seed in made.items():
            adapter = adapter_of(decoder, tmp_path / f"adapter-{seed}") if seed else None
            tiny.add(name, PROMPT, spare_tokens=0, adapter=adapter)
        names = list(made)
        for step in range(12):
            for name in names:
                tiny.make_room(name, 1 if step else len(PROMPT))
            tiny.step(**dict.fromkeys(names, 1 if step else len(PROMPT)))
            assert (tiny.engine._next._launched is not None) == (tiny is ahead)
            if step == 5:
                names.remove("a")
                tiny.engine.remove_sequence(RequestId("a"))
    for name in ("b", "c"):
        assert ahead.tokens(name) == plain.tokens(name)
    assert ahead.tokens("b") != ahead.tokens("c")


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


@pytest.mark.skipif(not decode_pass_available(), reason="the native kernels are not built")
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
