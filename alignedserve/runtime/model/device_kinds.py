"""Kinds of layers that a GPU computes by kernels of their own, and a small model of each for its self-check.

Widths of heads, latents and states are those of published models, so that kernels are compiled as they are for these;
nothing in them chooses between experts, where rounding alone would decide."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from alignedserve.runtime.model.decoder.decoder_parts import (
    MXFP4_GROUP,
    NVFP4_GROUP,
    CheckpointQuantization,
    QuantMethod,
)
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.decoder.state_config import DeltaConfig, ShortConvConfig, SpaceConfig

_ROWS = json.loads(Path(__file__).with_suffix(".json").read_text())


class DeviceKind(NamedTuple):
    """Which models have such layers, and the config.json of a small one."""

    is_of: Callable[[ModelConfig], bool]
    fields: dict[str, Any]
    instead: str = "engine.device=cpu"  # what to set where a GPU does not compute it


def _fields(name: str) -> dict[str, Any]:
    return {**_ROWS["sizes"], **_ROWS[name]}


def _with_narrow_experts(is_of: Callable[[CheckpointQuantization], bool], quantization: dict[str, Any]) -> DeviceKind:
    return DeviceKind(
        lambda config: config.stored_quantization is not None and is_of(config.stored_quantization),
        {**_fields("narrow experts"), "quantization_config": quantization},
    )


def _with_floats_of_4_bits(format_name: str, group_size: int) -> DeviceKind:
    numbers = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": group_size}
    groups = {"group_0": {"targets": ["Linear"], "weights": numbers}}
    quantization = {"quant_method": "compressed-tensors", "format": format_name, "config_groups": groups}
    return _with_narrow_experts(lambda stored: stored.has_float4(group_size), quantization)


RINGS = "windows that forget"  # of models whose cache is so, and no kind of theirs: see BlockLayout.with_rings
BLOCKS = "weights in blocks"
_OF_CONFIGS: dict[str, Callable[[ModelConfig], bool]] = {
    "attention sinks": lambda config: config.has_sinks,
    "latent attention": lambda config: config.latent is not None,
    "capped scores": lambda config: config.score_cap is not None,
    "chunked attention": lambda config: config.has_chunked_windows,
    "short convolutions": lambda config: isinstance(config.state, ShortConvConfig),
    "Mamba-2": lambda config: isinstance(config.state, SpaceConfig),
    "the gated delta rule": lambda config: isinstance(config.state, DeltaConfig),
    "heads of two sizes": lambda config: config.extras is not None,
}
KINDS = {
    **{name: DeviceKind(is_of, _fields(name)) for name, is_of in _OF_CONFIGS.items()},
    "weights in MXFP4": _with_floats_of_4_bits("mxfp4-pack-quantized", MXFP4_GROUP),
    "weights in NVFP4": _with_floats_of_4_bits("nvfp4-pack-quantized", NVFP4_GROUP),
    BLOCKS: _with_narrow_experts(
        lambda stored: stored.method is QuantMethod.BLOCKS, {"quant_method": QuantMethod.BLOCKS.value}
    ),
    RINGS: DeviceKind(lambda _: False, _fields(RINGS), instead="engine.window_cache=whole"),
}


def kinds_of(config: ModelConfig, *, has_rings: bool = False, is_gguf: bool = False) -> dict[str, str]:
    """Return the kinds in a model, each with what to set where a GPU does not compute it. `has_rings`: of its cache."""
    names = [name for name, kind in KINDS.items() if kind.is_of(config)]
    names += [name for name, is_there in ((BLOCKS, is_gguf), (RINGS, has_rings)) if is_there]
    return {name: KINDS[name].instead for name in names}
