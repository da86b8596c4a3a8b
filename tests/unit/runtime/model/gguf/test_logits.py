"""Logits of GGUF files against transformers' reading of the same files, unpacked and in blocks."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alignedserve.core.errors import ModelError
from alignedserve.gguf.file import GgufFile
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.model.gguf.config import gguf_config
from alignedserve.runtime.model.gguf.source import GgufSource
from alignedserve.runtime.model.weights import feed_forward_weights
from alignedserve.runtime.model.weights.weight_loader import assemble_weights
from tests.support.models.tiny_engines import logits_of, random_tokens, tiny_decoder
from tests.support.models.tiny_gguf import HEAD_DIM, write_tiny_gguf
from tests.support.models.tiny_models import transformers_library

pytestmark = pytest.mark.slow

EVERY_TYPE = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16", "F16", "F32")
TOKENS = random_tokens(1, 41)
STEPS = (30, *[1] * 11)
CASES = [
    ("llama", ("F32",)),
    ("llama", EVERY_TYPE),
    ("llama", ("Q4_1", "Q8_0")),
    ("llama", ("Q4_K", "Q6_K", "Q4_K")),
    ("llama", ("IQ4_NL", "IQ4_XS", "Q3_K", "IQ3_S", "Q2_K", "IQ2_XS")),
    ("qwen2", ("Q8_0", "Q5_0")),
    ("qwen3", ("Q4_0", "Q6_K")),
    ("qwen3", ("Q4_0", "Q4_1", "Q4_K")),
]


def reference_logits(path: Path, frequency_factors: Tensor | None = None, global_factor: float | None = None) -> Tensor:
    library = transformers_library()
    library.utils.logging.disable_progress_bar()
    config = library.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.head_dim = HEAD_DIM
    config.query_pre_attn_scalar = HEAD_DIM
    if global_factor is not None:  # transformers does not read it
        config.rope_parameters["full_attention"] |= {"rope_type": "linear", "factor": global_factor}
    model = library.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    tensors = import_module("transformers.modeling_gguf_pytorch_utils").load_gguf_checkpoint(
        str(path), return_tensors=True, model_to_load=model
    )["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    if missing:
        model.lm_head.weight = model.get_input_embeddings().weight
    if frequency_factors is not None:
        model.model.rotary_emb.inv_freq /= frequency_factors
    model.train(False)
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


def unpacked_decoder(path: Path, *, in_groups: bool = False) -> Decoder:
    """`in_groups`: packed as on a GPU."""
    file = GgufFile(path)
    config = gguf_config(file)
    device = torch.device("cpu")
    source = GgufSource(file, config, torch.float32, device, unpacks_all=not in_groups, in_groups=in_groups)
    return Decoder(config, assemble_weights(config, source))


def our_logits(path: Path, dtype: str = "float32", quantization: str | None = None) -> Tensor:
    return logits_of(tiny_decoder(path, dtype, quantization), TOKENS, *STEPS).float()


def relative_error(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).square().mean().sqrt() / expected.std())


@pytest.mark.parametrize(("architecture", "types"), CASES)
@pytest.mark.parametrize("has_head", [False, True])
def test_unpacked_weights_are_exact(architecture: str, types: tuple[str, ...], has_head: bool, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", architecture, types, has_head=has_head)
    expected = reference_logits(path)
    tolerance = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(logits_of(unpacked_decoder(path), TOKENS, *STEPS), expected, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize(("architecture", "types"), CASES)
def test_products_in_groups_round_nothing(
    architecture: str, types: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; experts too. Of types that no product is made of scales are rounded, as in blocks."""
    monkeypatch.setattr(feed_forward_weights, "has_experts_apart", lambda _: False)
    path = write_tiny_gguf(tmp_path / "a.gguf", architecture, types)
    decoder = unpacked_decoder(path, in_groups=True)
    expected = reference_logits(path)
    assert relative_error(logits_of(decoder, TOKENS, *STEPS), expected) < (2e-3 if "IQ3_S" in types else 1e-5)


@pytest.mark.parametrize(("architecture", "types"), CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_in_blocks_round_inputs_alone(
    architecture: str, types: tuple[str, ...], dtype: str, tmp_path: Path
) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", architecture, types)
    expected = reference_logits(path)
    # Inputs of 8 bits, each 32 with a scale of their own, through two layers and the head.
    assert relative_error(our_logits(path, dtype), expected) < 0.03


@pytest.mark.parametrize("factor", [None, 8.0])
def test_gemma_3(factor: float | None, tmp_path: Path) -> None:
    """Windows that cut the context, on all layers but the sixth, which alone is scaled."""
    metadata: dict[str, Any] = {"block_count": 7, "attention.sliding_window": 9, "rope.freq_base": 1e6}
    if factor is not None:
        metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
    path = write_tiny_gguf(tmp_path / "a.gguf", "gemma3", ("Q8_0",), metadata=metadata)
    expected = reference_logits(path, global_factor=factor)
    tolerance = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(logits_of(unpacked_decoder(path), TOKENS, *STEPS), expected, rtol=0.0, atol=tolerance)
    assert relative_error(our_logits(path), expected) < 0.05


def test_llama_3s_frequency_factors(tmp_path: Path) -> None:
    """transformers does not read their tensor, and is given them."""
    factors = torch.tensor([1.0] * 8 + [3.0] * 8)
    plain = write_tiny_gguf(tmp_path / "plain.gguf")
    scaled = write_tiny_gguf(tmp_path / "scaled.gguf", rope_factors=factors.numpy())
    assert relative_error(our_logits(scaled), our_logits(plain)) > 0.01
    expected = reference_logits(scaled, factors)
    torch.testing.assert_close(our_logits(scaled), expected, rtol=0.0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("bad", [[1.0] * 15, [0.0] * 16, [float("nan")] * 16])
def test_frequency_factors_that_are_none(bad: list[float], tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", rope_factors=torch.tensor(bad).numpy())
    with pytest.raises(ModelError, match="rope_freqs"):
        tiny_decoder(path)


def test_infinite_scales_are_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", "llama", ("Q4_0",))
    content = bytearray(path.read_bytes())
    place = GgufFile(path).tensors["blk.1.ffn_down.weight"].offset
    content[place : place + 2] = b"\x00\x7c"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_down\.weight cannot be used: it holds numbers"):
        tiny_decoder(path)


@pytest.mark.parametrize("entry", ["feed_forward_length", "attention.head_count_kv", "block_count"])
def test_sizes_that_tensors_do_not_have(entry: str, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", metadata={entry: 8})
    with pytest.raises(ModelError, match=r"blk\."):
        tiny_decoder(path)
