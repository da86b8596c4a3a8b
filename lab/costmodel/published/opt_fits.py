"""Linear fits of iteration times on A100-80GB, measured for DistServe's simulator (OSDI 2024), of two engines.

prefill = a + b * tokens + c * squared lengths
decode  = a + b * context tokens + c * requests, one fit below 95 requests and one from there on
"""

import json
from functools import cache
from typing import Any, NamedTuple

from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.hardware import HARDWARE, pcie_link
from alignedserve.costmodel.model import AttentionKernel
from alignedserve.costmodel.model_shapes import MODEL_SHAPES, ModelShape
from alignedserve.costmodel.work import IterationWork
from lab.costmodel.published.files import text_of

HARDWARE_NAME = "a100-80g"
_FILES = {"distserve": "a100_80g_opt_distserve_fit.json", "vllm": "a100_80g_opt_vllm_fit.json"}
_NAME_PREFIX = "facebook/"
_MS = 1e-3


class PrefillFit(NamedTuple):
    """Fit in seconds: a + b * tokens + c * squared lengths."""

    base_s: float
    token_s: float
    square_s: float

    def seconds(self, num_tokens: float, num_squares: float) -> float:
        """Return the seconds for prompts of `num_tokens` together; `num_squares`: their squared lengths summed."""
        return self.base_s + self.token_s * num_tokens + self.square_s * num_squares


class DecodeFit(NamedTuple):
    """Fit in seconds: a + b * context tokens + c * requests."""

    base_s: float
    context_token_s: float
    request_s: float

    def seconds(self, num_requests: int, context_len: float) -> float:
        return self.base_s + self.context_token_s * context_len + self.request_s * num_requests


class OptFit(NamedTuple):
    """One model at one degree of tensor parallelism."""

    prefill: PrefillFit
    small: DecodeFit
    large: DecodeFit
    large_from: int  # requests


class FittedOptModel:
    """Cost model of published fits: prefills and decodes alone cost what the fit says; for the rest, which it does not
    cover:

    - a chunk after cached tokens counts its pairs as a whole prompt would (2 * pairs - tokens squares);
    - chunks beside decodes: their attention each, and the linear layers once, over the tokens of both;
    - a hidden cache: its keys and values go through their matrices at the prefill's time per token;
    - from the threshold on never less than the fit below it says, for a model has to grow with the work;
    - a negative coefficient counts as 0, for the same reason.
    """

    def __init__(self, fit: OptFit, shape: ModelShape, swap_token_s: float, kernel: AttentionKernel) -> None:
        self._fit = fit
        self._kernel = kernel
        self._swap_token_s = swap_token_s
        projection_s = fit.prefill.token_s * shape.projection_flops / shape.token_flops
        self._hidden_token_s = max(projection_s - (1.0 - shape.hidden_ratio) * fit.small.context_token_s, 0.0)

    def iteration_s(self, work: IterationWork) -> float:
        compute = self._hidden_token_s * work.hidden_context_len
        compute += self._mixed_s(work) if work.num_chunks else self._decode_s(work)
        return max(compute, self.swap_s(work.swap_in_tokens + work.swap_out_tokens))

    def swap_s(self, num_tokens: float) -> float:
        return self._swap_token_s * num_tokens

    def _mixed_s(self, work: IterationWork) -> float:
        num_squares = 2 * work.prompt_pairs - work.num_prompt_tokens
        prefill = self._fit.prefill.seconds(work.num_tokens, num_squares)
        if not work.num_decodes:
            return prefill
        attention = self._fit.small.context_token_s * self._kernel.num_charged_keys(work)
        return max(prefill + attention, self._decode_s(work))

    def _decode_s(self, work: IterationWork) -> float:
        context_len = self._kernel.num_charged_keys(work)
        small = self._fit.small.seconds(work.num_decodes, context_len)
        if work.num_decodes < self._fit.large_from:
            return small
        return max(small, self._fit.large.seconds(work.num_decodes, context_len))


@cache
def read_fits(engine: str) -> dict[tuple[str, int], OptFit]:
    """Read the fits by model name and degree of tensor parallelism; `engine` is distserve or vllm."""
    content = json.loads(text_of(_FILES[engine]))
    return {
        (name.removeprefix(_NAME_PREFIX), int(degree)): _parse(fields)
        for name, by_degree in content.items()
        for degree, fields in by_degree.items()
    }


def _parse(fields: dict[str, Any]) -> OptFit:
    return OptFit(
        prefill=PrefillFit(*_seconds(fields["prefill"])),
        small=DecodeFit(*_seconds(fields["decoding_smallbs"])),
        large=DecodeFit(*_seconds(fields["decoding_largebs"])),
        large_from=fields["decoding_large_small_bs_threshold"],
    )


def _seconds(milliseconds: list[float]) -> tuple[float, ...]:
    return tuple(max(value, 0.0) * _MS for value in milliseconds)


def fitted_opt_model(engine: str, model: str, tensor_parallel: int, kernel: AttentionKernel) -> FittedOptModel:
    """Return the published fit. Raises ConfigError listing what there is."""
    fits = read_fits(engine)
    fit = fits.get((model, tensor_parallel))
    if fit is None:
        known = ", ".join(f"{name} x {degree}" for name, degree in fits)
        raise ConfigError(f"published {engine} has no {model!r} x {tensor_parallel} accelerators; it has {known}.")
    shape = MODEL_SHAPES[model]
    swap_token_s = shape.kv_token_bytes / tensor_parallel / pcie_link(HARDWARE[HARDWARE_NAME]).bytes_per_s
    return FittedOptModel(fit, shape, swap_token_s, kernel)
