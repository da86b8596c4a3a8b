"""Weights in the forms that a worker on a GPU holds, where there is none."""

from pathlib import Path

import pytest
import torch

from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.quantized.layout import Computing
from alignedserve.runtime.model.weight_files import load_weights
from alignedserve.runtime.model.weights.weight_loader import DecoderWeights


def weights_as_on_a_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, *, has_float8: bool
) -> DecoderWeights:
    """Load what a worker on a GPU would hold; its products run here by PyTorch."""

    def computing(device: str, dtype: str, _: bool) -> Computing:
        return Computing("cuda", dtype, has_float8)

    monkeypatch.setattr("alignedserve.runtime.model.quantized.source.Computing", computing)
    monkeypatch.setattr(
        "alignedserve.runtime.model.weights.feed_forward_weights.has_experts_apart", lambda device: False
    )
    return load_weights(folder, read_config(folder), dtype)
