"""The folders that adapters may be read from: named by the configuration, or below its allowed folder."""

from dataclasses import replace
from pathlib import Path

import msgspec

from alignedserve.config.sections import LoraConfig
from alignedserve.core.errors import AdapterError, ConfigError
from alignedserve.core.request import LoraAdapter
from alignedserve.runtime.lora.adapter_check import check_adapter
from alignedserve.runtime.lora.adapter_config import AdapterFiles, read_adapter_files
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.served_model import ServedModel


def allowed_path(path: str, config: LoraConfig) -> Path:
    """Return the folder, links followed. Raises AdapterError where the configuration does not allow it."""
    try:
        folder = Path(path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # such as links in a circle
        raise AdapterError("The adapter's path leads nowhere.") from error
    if any(Path(adapter).resolve() == folder for adapter in config.adapters.values()):
        return folder
    if config.allowed_folder is None:
        raise AdapterError("Adapters are loaded only where lora.allowed_folder is set.")
    if not folder.is_relative_to(Path(config.allowed_folder).resolve()):
        raise AdapterError("The adapter's folder is not inside lora.allowed_folder.")
    return folder


def read_adapter(adapter: LoraAdapter, config: LoraConfig) -> AdapterFiles:
    """Read an adapter's folder. Raises AdapterError where it is not allowed, or holds another adapter by now."""
    files = read_adapter_files(allowed_path(adapter.path, config), config.memory_bytes)
    if files.digest != adapter.digest:
        raise AdapterError("The files of the adapter have changed since it was loaded.")
    return files


def with_adapters(served: ServedModel, config: LoraConfig) -> ServedModel:
    """Return the model with the adapters of the configuration. Raises AdapterError naming one, or ConfigError."""
    if config.adapters and served.encoder is not None:
        raise ConfigError("lora.adapters are for decoders, not for an encoder; leave it out")
    if config.allowed_folder == "":
        raise ConfigError("lora.allowed_folder must name a folder; leave it out where none may be loaded")
    if served.name in config.adapters:
        raise ConfigError(f"lora.adapters has one of the model's own name, {served.name!r}")
    adapters = []
    for name, path in config.adapters.items():
        try:
            adapters.append(find_adapter(name, path, config, served.decoder))
        except AdapterError as error:
            raise AdapterError(f"lora.adapters, {name!r}: {error}") from error
    # Workers have other working directories.
    paths = {adapter.name: adapter.path for adapter in adapters}
    allowed = None if config.allowed_folder is None else str(Path(config.allowed_folder).resolve())
    lora = msgspec.structs.replace(config, adapters=paths, allowed_folder=allowed)
    return replace(served, lora=lora, adapters=tuple(adapters))


def find_adapter(name: str, path: str, config: LoraConfig, model: ModelConfig) -> LoraAdapter:
    """Read, check and name an adapter. Raises AdapterError."""
    files = read_adapter_files(allowed_path(path, config), config.memory_bytes)
    check_adapter(files, model, max_rank=config.max_rank)
    return LoraAdapter(name, str(files.folder), files.digest)
