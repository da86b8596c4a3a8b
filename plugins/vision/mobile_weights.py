"""Loads the weights of MobileNet-V5, and of what makes prompt tokens of its map."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from alignedserve.runtime.model.weights.safetensors_source import SafetensorsSource
from alignedserve.runtime.model.weights.weight_source import RandomSource, WeightSource
from plugins.vision.mobile_config import MobileConfig

_SEED = 1
_PREFIXES = ("model.", "")
_TOWER, _CONNECTOR = "vision_tower.timm_model.", "embed_vision."


@dataclass(frozen=True, slots=True)
class MobileWeights:
    """Tensors by their names, on one device and in one dtype."""

    tower: Mapping[str, Tensor]
    connector: Mapping[str, Tensor]


def load_mobile_weights(
    folder: Path | None, config: MobileConfig, dtype: torch.dtype, device: torch.device
) -> MobileWeights:
    """Load the weights in `folder` as `dtype`; None: random ones. Raises ModelError naming file or tensor."""
    source: WeightSource
    source = RandomSource(_SEED, dtype, device) if folder is None else SafetensorsSource(folder, dtype, device)
    found = (prefix for prefix in _PREFIXES if source.has(f"{prefix}{_TOWER}conv_stem.conv.weight"))
    prefix = next(found, _PREFIXES[0])
    tower, connector = (
        {name: source.tensor(prefix + part + name, shape) for name, shape in shapes.items()}
        for part, shapes in ((_TOWER, config.tower_shapes()), (_CONNECTOR, config.connector_shapes()))
    )
    return MobileWeights(tower, connector)
