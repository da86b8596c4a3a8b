"""Engines over a cache of int8: how far logits move, and that generation is the same however it is cut."""

from pathlib import Path

import pytest
import torch

from alignedserve.config.sections import ClusterConfig, EngineConfig, ModelSectionConfig
from alignedserve.config.unset_sizes import from_mapping
from alignedserve.core.block_layout import INT8
from alignedserve.core.errors import ConfigError
from alignedserve.runtime.attention.backend import AUTO, TORCH
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.model.served_model import resolve_model
from kernels.cpu.native import supported_levels
from tests.support.models.tiny_engines import LogitsProbe, TinyEngine, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

FAMILIES = ("llama", "llama_mqa", "opt", "mistral_window", "qwen3")
KERNELS = (TORCH, *supported_levels())
TOKENS = random_tokens(1, 60)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp(request.param)
    make_tiny_model(made, request.param)
    return made


def logits_of(decoder: Decoder, cuts: list[int], attention: str = AUTO, cache_dtype: str | None = INT8) -> torch.Tensor:
    probe = LogitsProbe(decoder, 8, attention, cache_dtype)
    probe.add("a", TOKENS)
    for count in cuts:
        probe.step(a=count)
    return probe.logits("a").double()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_move_little_and_alike_by_every_kernel(folder: Path, dtype: str) -> None:
    decoder = tiny_decoder(folder, dtype)
    cuts = [37, 1, 1, 20, 1]
    exact = logits_of(tiny_decoder(folder), cuts, cache_dtype=None)
    moved = {}
    for attention in KERNELS if dtype != "float16" else (TORCH,):
        error = (logits_of(decoder, cuts, attention) - exact).norm() / exact.norm()
        moved[attention] = float(error)
    assert all(0.0 < error < 0.03 for error in moved.values()), moved
    assert max(moved.values()) < 1.2 * min(moved.values()), moved


@pytest.mark.parametrize("cache_dtype", [INT8, None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", KERNELS)
def test_a_cache_that_is_not_finite_fails_its_own_request(
    folder: Path, attention: str, dtype: str, cache_dtype: str | None
) -> None:
    """Keys and values each, decoded and in a chunk."""
    decoder = tiny_decoder(folder, dtype)
    for name in ("key_slots", "value_slots"):
        for count in (1, 3):
            engine = TinyEngine(decoder, attention=attention, cache_dtype=cache_dtype)
            for request in ("good", "bad"):
                engine.add(request, TOKENS[: 19 + count])
            engine.step(good=19, bad=19)
            storage = engine.storage
            # The 17th token: NaN, or all bits set, so that scales are.
            slots = getattr(storage, name)(1)
            slots[engine.blocks["bad"][4] * storage.slot_stride] = -1 if cache_dtype else float("nan")
            output = engine.step(good=count, bad=count)
            assert output.failed == ["bad"], (name, count)
            assert [token.request_id for token in output.sampled] == ["good"], (name, count)


def test_names_of_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be one of auto, int8, fp8"):
        from_mapping({"engine": {"kv_cache_dtype": "fp4"}})
    assert ClusterConfig().engine.kv_cache_dtype == "auto"
    assert resolve_model(ModelSectionConfig()).block_layout(16).dtype == "float32"
    assert resolve_model(ModelSectionConfig(), EngineConfig(kv_cache_dtype="int8")).block_layout(16).dtype == INT8
