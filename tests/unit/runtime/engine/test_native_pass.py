"""Decodes through all layers in one call of the native kernels: the same bits as layer by layer."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from alignedserve.core.request import SampledToken, SamplingParams
from alignedserve.runtime.engine.forward import native_pass
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.forward.forward_batch import ForwardBatch
from alignedserve.runtime.engine.forward.native_pass import NativePass
from alignedserve.runtime.kv.block_storage import BlockStorage
from kernels.cpu.decode_pass import decode_pass_available
from kernels.cpu.native import supported_levels
from tests.support.models.tiny_engines import GREEDY, LogitsProbe, TinyEngine, random_tokens, tiny_decoder
from tests.support.models.tiny_gguf import write_tiny_gguf
from tests.support.models.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not decode_pass_available(), reason="the native kernels are not built"),
]

# Of all norms, biases, windows, and two rotary embeddings.
FAMILIES = ("llama", "opt", "mistral_window", "qwen2_window", "qwen3", "gemma3_text", "phi3")
# Of embedding and last product; queries, keys, values, attention's output, gates, ups.
BLOCKS = (("Q4_1",), ("Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q4_K"), ("Q8_0", *["Q4_0"] * 6))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        make_tiny_model(folder, family)
        config = json.loads((folder / "config.json").read_text())
        if "query_pre_attn_scalar" in config:  # as models of 1B and 4B have it; others scale queries apart
            config["query_pre_attn_scalar"] = config["head_dim"]
            (folder / "config.json").write_text(json.dumps(config))
        return folder

    return cache(make)


def logits_of(decoder: Decoder, *, attention: str | None = None, cache_dtype: str | None = None) -> torch.Tensor:
    """Return logits of a prompt in a chunk, and of one to three decodes, some past a window and past a block."""
    probe = LogitsProbe(decoder, attention=attention or supported_levels()[0], cache_dtype=cache_dtype)
    for seed, (name, count) in enumerate({"a": 41, "b": 7, "c": 22}.items()):
        probe.add(name, random_tokens(seed, count, 128))
    probe.step(a=5, b=1, c=3)
    for step in range(36):
        probe.step(**{name: 1 for name, last in {"a": 36, "b": 6, "c": 19}.items() if step < last})
    return torch.cat([probe.logits(name) for name in "abc"])


def in_one_call_and_by_layers(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, cache_dtype: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    suited: list[bool] = []
    suits = NativePass.suits

    def noted(self: NativePass, batch: ForwardBatch) -> bool:
        suited.append(suits(self, batch))
        return suited[-1]

    monkeypatch.setattr(NativePass, "suits", noted)
    fused = logits_of(decoder, cache_dtype=cache_dtype)
    assert suited == [False] + [True] * 36, "the prompt alone goes layer by layer"
    monkeypatch.setattr(NativePass, "suits", lambda self, batch: False)
    return fused, logits_of(decoder, cache_dtype=cache_dtype)


@pytest.mark.parametrize(
    ("family", "dtype", "threads"),
    [(family, ("float32", "bfloat16")[at % 2], (1, 3)[at // 2 % 2]) for at, family in enumerate(FAMILIES)],
)
def test_same_bits_as_layer_by_layer(
    family: str, dtype: str, threads: int, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny_decoder(folder_of(family), dtype)
    torch.set_num_threads(threads)
    try:
        fused, separate = in_one_call_and_by_layers(decoder, monkeypatch)
    finally:
        torch.set_num_threads(1)
    assert fused.isfinite().all()
    assert torch.equal(fused, separate)


@pytest.mark.parametrize(("family", "part_s"), [("opt", 1e-9), ("gemma3_text", 1e-9), ("qwen3", 1.0)])
def test_a_pass_in_parts(
    family: str, part_s: float, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer at a time, and slices of the head; or as much as takes a second: all."""
    whole = logits_of(tiny_decoder(folder_of(family), "bfloat16"))
    monkeypatch.setattr(native_pass, "_PART_S", part_s)
    stopping, stops = tiny_decoder(folder_of(family), "bfloat16"), list[None]()
    stopping.stop_for(lambda: stops.append(None))
    assert torch.equal(logits_of(stopping), whole)
    num_layers, num_slices = stopping.config.num_layers, native_pass._MOST_SLICES
    # The prompt goes layer by layer; the first pass of all, and the first head, do not know yet how long parts take.
    num_passes, num_heads = (1, 1) if part_s == 1.0 else (36, 64)
    assert len(stops) == num_layers + num_passes * (num_layers - 1) + num_heads * (num_slices - 1)


@pytest.mark.parametrize(("family", "temperature"), [("opt", 0.0), ("llama", 0.9)])
def test_passes_within_the_parts_of_another(
    family: str, temperature: float, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a chat within passes that keep their highest logits alone, and within such as draw from all."""
    prompt, chat = random_tokens(1, 12, 128), random_tokens(2, 40, 128)
    sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=100)

    def generated(decoder: Decoder) -> list[int]:
        tiny = TinyEngine(decoder)
        tiny.add("own", prompt, sampling)
        return [token.token_id for token in tiny.generate("own", 12)]

    whole, alone = generated(tiny_decoder(folder_of(family), "bfloat16")), chat_logits(folder_of(family), chat)
    monkeypatch.setattr(native_pass, "_PART_S", 1e-9)
    decoder, within = tiny_decoder(folder_of(family), "bfloat16"), list[int]()
    other = LogitsProbe(decoder)
    other.add("chat", chat)

    def run_another() -> None:
        if len(within) == len(chat) or (within and within[-1] < 0):
            return
        within.append(-1)
        other.step(chat=1)
        within[-1] = 1

    decoder.stop_for(run_another)
    assert generated(decoder) == whole
    assert within == [1] * len(chat)
    assert torch.equal(other.logits("chat"), alone)


def chat_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    probe = LogitsProbe(tiny_decoder(folder, "bfloat16"))
    probe.add("chat", tokens)
    for _ in tokens:
        probe.step(chat=1)
    return probe.logits("chat")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_and_cache_of_8_bits(
    dtype: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, separate = in_one_call_and_by_layers(tiny_decoder(folder_of("llama"), dtype, "int8"), monkeypatch, "int8")
    assert torch.equal(fused, separate)


@pytest.mark.parametrize("types", BLOCKS)
def test_weights_in_blocks(types: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny_decoder(write_tiny_gguf(tmp_path / "tiny.gguf", types=types), "bfloat16")
    fused, separate = in_one_call_and_by_layers(decoder, monkeypatch)
    assert torch.equal(fused, separate)


@pytest.mark.parametrize(("family", "dtype"), [("llama", "bfloat16"), ("opt", "float32")])
def test_greedy_tokens_are_the_same_where_logits_are_not_kept(
    family: str, dtype: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny_decoder(folder_of(family), dtype)
    kept: list[int] = []
    decode = Decoder.decode

    def counted(self: Decoder, batch: ForwardBatch, storage: BlockStorage) -> torch.Tensor | None:
        kept.append(1)
        return decode(self, batch, storage)

    monkeypatch.setattr(Decoder, "decode", counted)

    def generated(sampling: SamplingParams) -> list[int]:
        kept.clear()
        tiny = TinyEngine(decoder)
        tiny.add("other", random_tokens(2, 9, 128), sampling)
        tiny.step(other=9)
        tiny.add("own", random_tokens(1, 12, 128))
        return [token.token_id for token in tiny.generate("own", 20, "other")]

    alone = generated(GREEDY)
    assert not kept
    # One sequence that draws or changes its logits has all of the batch kept.
    assert generated(SamplingParams(temperature=0.9, seed=1, max_tokens=100)) == alone
    assert len(kept) == 19
    assert generated(SamplingParams(temperature=0.0, frequency_penalty=1.0, max_tokens=100)) == alone
    assert len(kept) == 19


@pytest.mark.parametrize(("family", "dtype"), [("llama", "bfloat16"), ("opt", "float32")])
def test_log_probabilities_with_the_head_in_the_call_and_apart(
    family: str, dtype: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny_decoder(folder_of(family), dtype)
    sampling = SamplingParams(temperature=0.0, max_tokens=100, num_logprobs=3)

    def generated() -> list[SampledToken]:
        tiny = TinyEngine(decoder)
        tiny.add("other", random_tokens(2, 9, 128))
        tiny.step(other=9)
        tiny.add("own", random_tokens(1, 12, 128), sampling)
        return tiny.generate("own", 20, "other")

    together = generated()
    monkeypatch.setattr(NativePass, "suits", lambda self, batch: False)
    assert generated() == together


def test_many_rows_of_whole_pages_are_computed_as_each_alone(tmp_path: Path) -> None:
    """They lie apart from one another, see kernels/csrc/products.h."""
    make_tiny_model(tmp_path, "llama", hidden_size=1024, intermediate_size=2048, num_hidden_layers=1, head_dim=64)
    decoder = tiny_decoder(tmp_path)
    together = TinyEngine(decoder, max_sequences=20)
    names = [f"row {number}" for number in range(20)]
    for seed, name in enumerate(names):
        together.add(name, random_tokens(seed, 5 + seed))
        together.step(**{name: 5 + seed})
    for _ in range(4):
        together.step(**dict.fromkeys(names, 1))
    for seed, name in list(enumerate(names))[::7]:
        alone = TinyEngine(decoder)
        alone.add(name, random_tokens(seed, 5 + seed))
        alone.generate(name, 5)
        assert together.tokens(name) == alone.tokens(name)
