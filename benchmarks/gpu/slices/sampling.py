"""Sampling with every filter, of few and many rows, over logits as flat and as peaked as models' are."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.kernels.cases import TORCH, TRITON, KernelCase, KernelSetup
from kernels.sampling import Filters, RowParameters, sample

_ROWS, _TOY_ROWS = (1, 64, 256), (2,)
_VOCABULARY = 128256
_FILTERS = {"top-p 0.9": (0, 0.9, 0.0), "top-k 50": (50, 1.0, 0.0), "top-k 50, top-p 0.9": (50, 0.9, 0.0)}
_FILTERS |= {"min-p 0.05": (0, 1.0, 0.05), "none": (0, 1.0, 0.0)}
_SPREADS = {"flat": 0.5, "peaked": 6.0}  # standard deviations of logits


def sampling_cases(setup: KernelSetup) -> Iterator[list[KernelCase]]:
    """Yield groups to be measured by turns; bytes count once, whatever an implementation reads."""
    kernels = setup.kernels("token_sampling")
    vocabulary = setup.config.vocab_size if setup.is_toy else _VOCABULARY
    for rows in _TOY_ROWS if setup.is_toy else _ROWS:
        for shape, spread in _SPREADS.items():
            logits = torch.randn(rows, vocabulary, device=setup.device) * spread
            for name, (top_k, top_p, min_p) in _FILTERS.items():
                own = RowParameters(
                    temperatures=torch.ones(rows, device=setup.device),
                    top_k=torch.full((rows,), top_k, device=setup.device),
                    top_p=torch.full((rows,), top_p, device=setup.device),
                    min_p=torch.full((rows,), min_p, device=setup.device),
                    draws=torch.rand(rows, dtype=torch.float64, device=setup.device),
                )
                case = partial(
                    KernelCase,
                    "sampling",
                    f"{name}, {shape}, {rows} x {vocabulary}",
                    num_bytes=4 * logits.numel(),
                    is_copy=False,
                )
                filters = Filters(own.top_k, own.top_p, own.min_p)
                group = [case(TORCH, partial(sample, logits, filters, own.draws))]
                if kernels is not None:
                    group.append(case(TRITON, partial(kernels.sample_tokens, logits, own)))
                yield group
