"""flash-attn for prompts that are computed from their start, where it is installed and faster than our Triton kernel.

Its paged cache has blocks of 256 tokens, so contexts in smaller blocks are left to our kernel. The faster of the two is
measured when an engine starts, on prompts of its model's heads.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from alignedserve.runtime.device.timing import DeviceTimer

PROMPT_TOKENS = 2048  # of the measured prompt
OWN, FLASH = "own kernel", "flash-attn"
_ROUNDS, _WARM_UPS = 9, 3

# Queries, keys and values of prompts one after another, the first row of each (and their end), the longest, the window.
WholePrompts = Callable[[Tensor, Tensor, Tensor, Tensor, int, int | None], Tensor]


class PromptChoice(NamedTuple):
    """Seconds for a prompt of 2048 tokens by each available kernel."""

    seconds: dict[str, float]

    @property
    def chosen(self) -> str:
        """Return the name of the fastest."""
        return min(self.seconds, key=lambda name: self.seconds[name])

    def __str__(self) -> str:
        times = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in self.seconds.items())
        return f"{self.chosen} (measured on {PROMPT_TOKENS} tokens: {times})"


def flash_prompts() -> WholePrompts | None:
    """Return flash-attn's kernel; None where it is not installed, or cannot be loaded."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        varlen: Any = importlib.import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, AttributeError, OSError):  # built for another PyTorch or another CUDA
        return None

    def prompts(
        queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, longest: int, window: int | None
    ) -> Tensor:
        """Compute queries [tokens, heads, head_dim]; keys, values [tokens, kv_heads, head_dim] -> as queries."""
        result: Tensor = varlen(
            queries,
            keys,
            values,
            starts,
            starts,
            longest,
            longest,
            softmax_scale=1.0 / math.sqrt(queries.shape[-1]),
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
        )
        return result

    return prompts


def choose_prompts(
    flash: WholePrompts, own: Callable[[Tensor, Tensor], object], heads: tuple[int, int, int], like: Tensor
) -> PromptChoice:
    """Measure both kernels on one whole prompt.

    `own` fills its second argument from queries [tokens, kv_heads, group, head_dim]; `heads`: kv_heads, group,
    head_dim; `like`: dtype and device.
    """
    kv_heads, group, head_dim = heads

    def randoms(*shape: int) -> Tensor:
        return torch.randn(shape, device=like.device).to(like.dtype)

    queries = randoms(PROMPT_TOKENS, kv_heads, group, head_dim)
    keys, values = (randoms(PROMPT_TOKENS, kv_heads, head_dim) for _ in range(2))
    out = torch.empty_like(queries)
    starts = torch.from_numpy(np.array([0, PROMPT_TOKENS], np.int32)).to(like.device)
    flat = queries.view(PROMPT_TOKENS, kv_heads * group, head_dim)
    timer = DeviceTimer(like.device, num_rounds=_ROUNDS, warm_ups=_WARM_UPS, cold_bytes=0)
    seconds = timer.by_turns(
        [lambda: own(queries, out), lambda: flash(flat, keys, values, starts, PROMPT_TOKENS, None)]
    )
    return PromptChoice(dict(zip((OWN, FLASH), seconds, strict=True)))
