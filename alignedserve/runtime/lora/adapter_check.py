"""Checks an adapter's files against a model, by the config and the header alone; without torch."""

from typing import NamedTuple

from alignedserve.runtime.lora.adapter_config import CONFIG_NAME, AdapterConfig, parse_adapter_config
from alignedserve.runtime.lora.adapter_files import WEIGHTS_NAME, AdapterFiles
from alignedserve.runtime.lora.adapter_modules import AdaptableModule, adaptable_modules
from alignedserve.runtime.lora.adapter_tensors import MatrixNames, adapted_modules, tensor_forms
from alignedserve.runtime.model.model_config import ModelConfig


class CheckedAdapter(NamedTuple):
    """An adapter that fits the model."""

    config: AdapterConfig
    modules: dict[str, tuple[AdaptableModule, MatrixNames]]  # that it changes, by name


def check_adapter(files: AdapterFiles, model: ModelConfig, *, max_rank: int) -> CheckedAdapter:
    """Return what the adapter changes. Raises AdapterError naming what does not fit the model."""
    config = parse_adapter_config(files.config, f"{files.folder.name}/{CONFIG_NAME}", max_rank)
    where = f"{files.folder.name}/{WEIGHTS_NAME}"
    modules = adaptable_modules(model)
    found = adapted_modules(tensor_forms(files.weights, where), modules, config, where)
    return CheckedAdapter(config, {name: (modules[name], names) for name, names in found.items()})
