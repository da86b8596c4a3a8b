"""PEFT folders of LoRA adapters with random matrices, and models with them merged, for tests."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from alignedserve.runtime.lora.adapter_check import adaptable_modules
from alignedserve.runtime.model.decoder.model_config import ModelConfig

LLAMA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    reference: Any,
    *,
    targets: Sequence[str] = LLAMA_TARGETS,
    rank: int = 4,
    alpha: float = 16.0,
    seed: int = 0,
    scale: float = 0.2,
    **options: Any,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Write an adapter of the model's linear layers whose names end with one of `targets`; return A and B by module.

    `reference`: a model of transformers, or our config of one. `scale`: standard deviation of both matrices.
    `options`: further fields of the config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    matrices: dict[str, tuple[Tensor, Tensor]] = {}
    for name, (num_rows, in_width) in _linear_shapes(reference).items():
        if name.rsplit(".", 1)[-1] in targets:
            own_rank = next((r for key, r in options.get("rank_pattern", {}).items() if name.endswith(key)), rank)
            a = torch.randn(own_rank, in_width, generator=generator) * scale
            matrices[name] = a, torch.randn(num_rows, own_rank, generator=generator) * scale
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **options}))
    tensors = {
        f"base_model.model.{name}.lora_{part}.weight": matrix
        for name, pair in matrices.items()
        for part, matrix in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return matrices


def _linear_shapes(reference: Any) -> dict[str, tuple[int, int]]:
    """Return the shapes of the weights by the names of their modules."""
    if isinstance(reference, ModelConfig):
        modules = adaptable_modules(reference).items()
        return {name: (own.num_rows, own.in_width) for name, own in modules if name.startswith("model.")}
    found = {name: module for name, module in reference.named_modules() if isinstance(module, nn.Linear)}
    return {name: (module.out_features, module.in_features) for name, module in found.items()}


def merge(reference: Any, folder: Path, matrices: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Add an adapter of `write_adapter` to the weights of the model, computed in its own dtype."""
    config = json.loads((folder / "adapter_config.json").read_text())
    for name, (a, b) in matrices.items():
        alphas = config.get("alpha_pattern", {}).items()
        alpha = next((value for key, value in alphas if name.endswith(key)), config["lora_alpha"])
        scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
        weight = reference.get_submodule(name).weight
        weight.data += scale * (b.to(weight.dtype) @ a.to(weight.dtype))
