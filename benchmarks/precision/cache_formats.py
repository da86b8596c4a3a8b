"""What narrower keys and values cost on real text: the next tokens of SmolLM2 135M over the project's documentation.

    python -m benchmarks.precision.cache_formats [GGUF file] [texts] [tokens of each]

Everything is computed in float32; keys and values are rounded, as each form stores them, before any token reads them.
Forms with other scales than the caches have are simulated alike. Per form: share of tokens where the likeliest next one
is that of exact caches, mean Kullback-Leibler divergence, perplexity.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from alignedserve.runtime.engine.decoder import Decoder
from alignedserve.runtime.model.built_in import SMOLLM2, model_path
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.weight_files import load_weights
from alignedserve.text.tokenizer import Tokenizer
from benchmarks.precision.quantization import distance, logits_of
from benchmarks.support.recording import write_result
from kernels.float8_rows import LARGEST, dequantise_float8_rows, quantise_float8_rows
from kernels.int8_rows import dequantise_rows, quantise_rows

DOCS = Path(__file__).parent.parent.parent / "docs"
_DEFAULTS = ((2, 8), (3, 768))  # texts and tokens, by place among the arguments
_BLOCK = 16  # tokens
Rounding = Callable[[Tensor], Tensor]  # of heads [tokens, kv_heads, head_dim]


class Form(NamedTuple):
    """One form of keys and values."""

    name: str
    round_keys: Rounding
    round_values: Rounding


def _int8(heads: Tensor) -> Tensor:
    out = torch.empty_like(heads).flatten(1)
    return dequantise_rows(quantise_rows(heads), heads.shape[1], out).view(heads.shape)


def _float8(heads: Tensor) -> Tensor:
    out = torch.empty_like(heads).flatten(1)
    return dequantise_float8_rows(quantise_float8_rows(heads), heads.shape[1], out).view(heads.shape)


def _bfloat16(heads: Tensor) -> Tensor:
    return heads.bfloat16().float()


def _exact(heads: Tensor) -> Tensor:
    return heads


def scaled_float8(heads: Tensor, largest: Tensor) -> Tensor:
    """Round to e4m3 with scales of which `largest` become 448."""
    scales = (largest / LARGEST).clamp(min=1e-30)
    return (heads / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scales


def _parts(heads: Tensor) -> list[Tensor]:
    return [heads[first : first + _BLOCK] for first in range(0, len(heads), _BLOCK)]


def _by_block(heads: Tensor) -> Tensor:
    """Round with a scale per head of 16 tokens."""
    return torch.cat([scaled_float8(part, part.abs().amax((0, 2), keepdim=True)) for part in _parts(heads)])


def _by_channel(heads: Tensor) -> Tensor:
    """Round with a scale per channel of 16 tokens."""
    return torch.cat([scaled_float8(part, part.abs().amax(0, keepdim=True)) for part in _parts(heads)])


def _by_layer(heads: Tensor) -> Tensor:
    """Round without scales, as caches of FP8 that no calibration has seen."""
    return scaled_float8(heads, torch.full((1, 1, 1), LARGEST))


def _centred(rounding: Rounding) -> Rounding:
    """Return the rounding of what differs from the mean of each channel over the text, which is kept."""

    def centred(heads: Tensor) -> Tensor:
        mean = heads.mean(0, keepdim=True)
        return rounding(heads - mean) + mean

    return centred


FORMS = (
    Form("bfloat16", _bfloat16, _bfloat16),
    Form("int8, as cached", _int8, _int8),
    Form("fp8, as cached: per token and head", _float8, _float8),
    Form("fp8 keys, exact values", _float8, _exact),
    Form("exact keys, fp8 values", _exact, _float8),
    Form("int8 keys, fp8 values", _int8, _float8),
    Form("fp8 without scales", _by_layer, _by_layer),
    Form("fp8 per head of 16 tokens", _by_block, _by_block),
    Form("fp8 per channel of 16 tokens", _by_channel, _by_channel),
    Form("fp8 per token and head, less each channel's mean", _centred(_float8), _centred(_float8)),
)


def texts(tokenizer: Tokenizer, count: int, num_tokens: int) -> list[list[int]]:
    """Return the beginnings of the longest pages of the documentation."""
    pages = sorted(DOCS.rglob("*.md"), key=lambda page: (-page.stat().st_size, page.name))[:count]
    return [tokenizer.encode(page.read_text(), add_special_tokens=False)[:num_tokens] for page in pages]


class RoundedPlacement:
    """A model's placement of heads, after which keys and values are rounded, here and in the cache."""

    def __init__(self, decoder: Decoder, form: Form) -> None:
        config = decoder.config
        self._place: Any = decoder._place
        self.angle_dtype, self._form = self._place.angle_dtype, form
        self._heads, self._kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim

    def __call__(self, fused: Tensor, norms: Any, rotation: Any, slots: Tensor, *cached: Tensor) -> None:
        """See HeadPlacement."""
        self._place(fused, norms, rotation, slots, *cached)
        heads = fused.view(len(fused), -1, self._head_dim)
        first_value = self._heads + self._kv_heads
        own = (heads[:, self._heads : first_value], heads[:, first_value:])
        for part, kept, rounding in zip(own, cached, (self._form.round_keys, self._form.round_values), strict=True):
            part.copy_(rounding(part.contiguous()))
            kept.index_copy_(0, slots, part.flatten(1))


def logits_with(decoder: Decoder, token_ids: list[int], form: Form | None) -> Tensor:
    """Return the logits of a text whose keys and values have this form; None: as they are."""
    if form is None:
        return logits_of(decoder, token_ids)
    with mock.patch.object(decoder, "_place", RoundedPlacement(decoder, form)):
        return logits_of(decoder, token_ids)


def loss_of(logits: Tensor, token_ids: list[int]) -> float:
    """Return the mean negative log-probability of the tokens, less the first."""
    target = torch.tensor(token_ids[1:])
    return float(torch.nn.functional.cross_entropy(logits[:-1], target))


@torch.inference_mode()
def measure(decoder: Decoder, token_lists: list[list[int]]) -> dict[str, Any]:
    """Return the figures of every form, means over the texts."""
    sums = {form.name: [0.0, 0.0, 0.0] for form in FORMS}
    exact_loss = 0.0
    for index, token_ids in enumerate(token_lists):
        exact = logits_with(decoder, token_ids, None)
        exact_loss += loss_of(exact, token_ids)
        for form in FORMS:
            found = logits_with(decoder, token_ids, form)
            apart = distance(exact, found)
            own = (apart.same_likeliest, apart.divergence, loss_of(found, token_ids))
            sums[form.name] = [total + one for total, one in zip(sums[form.name], own, strict=True)]
        print(f"{index + 1} of {len(token_lists)} texts", flush=True)
    count = len(token_lists)
    rows = {
        name: {"same_likeliest": same / count, "divergence": apart / count, "perplexity": math.exp(loss / count)}
        for name, (same, apart, loss) in sums.items()
    }
    return {"exact": {"perplexity": math.exp(exact_loss / count)}, **rows}


def main() -> None:
    """Measure, print, record."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else model_path(SMOLLM2)
    count, num_tokens = (int(sys.argv[index]) if len(sys.argv) > index else default for index, default in _DEFAULTS)
    config = read_config(path)
    decoder = Decoder(config, load_weights(path, config, torch.float32))
    token_lists = texts(Tokenizer.load(path), count, num_tokens)
    forms = measure(decoder, token_lists)
    figures = {"model": path.name, "tokens": sum(map(len, token_lists)), "forms": forms}
    for name, row in forms.items():
        print(name, {key: round(value, 4) for key, value in row.items()})
    write_result("cache_formats", figures)


if __name__ == "__main__":
    main()
