"""Writes a model folder with the matrices of another's layers rounded to 4 or 8 bits. The other's files stay."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from alignedserve.core.errors import ConfigError, UnsupportedModel
from alignedserve.core.json_fields import read_json_object
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.families.table import FAMILIES
from alignedserve.runtime.model.hf_config import MAX_CONFIG_BYTES, read_model_config
from alignedserve.runtime.model.quantized.layout import BLOCK, member_of_stack
from alignedserve.runtime.model.quantized.rounding import to_blocks, to_int8, to_mxfp4
from alignedserve.runtime.model.weight_index import INDEX_NAME, SINGLE_NAME
from alignedserve.runtime.model.weight_names import LinearModule, find_head, find_prefix, linear_modules
from alignedserve.runtime.model.weights.safetensors_source import SafetensorsSource

_SHARD_BYTES = 2 << 30
_COPIED = (".json", ".jinja", ".model", ".txt")

Round = Callable[[Tensor], dict[str, Tensor]]
Note = Callable[[int, int], None]  # of matrices that are done, and all


def _compressed_tensors(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"strategy": "group", "group_size": BLOCK, **weights}}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": groups,
    }


class _Form(NamedTuple):
    round: Round
    config: dict[str, Any]  # quantization_config


_FORMS = {
    "q4_k": _Form(to_blocks, {"quant_method": "gguf_blocks"}),
    "int8": _Form(to_int8, _compressed_tensors("pack-quantized", {"num_bits": 8, "type": "int", "symmetric": True})),
    "mxfp4": _Form(
        to_mxfp4, _compressed_tensors("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "symmetric": True})
    ),
}
FORMS = tuple(_FORMS)


class QuantizedFolder(NamedTuple):
    """What was written."""

    num_matrices: int
    num_left: int  # matrices whose inputs do not fill blocks of 32
    bytes_before: int  # of all tensors
    bytes_after: int


def quantize_folder(folder: Path, output: Path, form_name: str, note: Note) -> QuantizedFolder:
    """Round every matrix of the layers but those of routers; embeddings and the head stay. One matrix at a time.

    Raises ConfigError for a form or an output that cannot be, ModelError.
    """
    if form_name not in _FORMS:
        raise ConfigError(f"--to {form_name!r} is not one of {', '.join(FORMS)}")
    config = read_model_config(folder)
    if config.stored_quantization is not None:
        raise UnsupportedModel(f"{folder} is quantised already ({config.stored_quantization.method.value}).")
    if FAMILIES[config.family].names.transposes_experts:
        raise UnsupportedModel(f"{folder}: the experts of {config.family} lie in one tensor, which is not rounded.")
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"--output {output} is not empty")
    output.mkdir(parents=True, exist_ok=True)
    source, form = SafetensorsSource(folder, torch.float32, torch.device("cpu")), _FORMS[form_name]
    modules = _modules(config, source)
    rounded = {module.name: module for module in modules if module.width % BLOCK == 0}
    writer = _ShardWriter(output)
    for name, tensor in _tensors(source, rounded, form.round, note):
        writer.add(name, tensor)
    bytes_after = writer.finish()
    stored = read_json_object(folder / "config.json", MAX_CONFIG_BYTES)
    (output / "config.json").write_text(json.dumps(stored | {"quantization_config": form.config}, indent=2) + "\n")
    for path in sorted(folder.iterdir()):
        if path.suffix in _COPIED and path.name not in ("config.json", INDEX_NAME):
            shutil.copyfile(path, output / path.name)
    locations = [source.index.location(name) for name in source.index.file_of]
    bytes_before = sum(location.num_bytes for location in locations if location is not None)
    return QuantizedFolder(len(rounded), len(modules) - len(rounded), bytes_before, bytes_after)


def _modules(config: ModelConfig, source: SafetensorsSource) -> list[LinearModule]:
    names = FAMILIES[config.family].names
    head = find_head(names, source.has)
    all_modules = linear_modules(config, names, find_prefix(names, source.has), source.has)
    return [module for module in all_modules if module.name != head]


def _tensors(
    source: SafetensorsSource, rounded: dict[str, LinearModule], round_: Round, note: Note
) -> Iterator[tuple[str, Tensor]]:
    replaced = {f"{stem}.weight" for name in rounded for stem in (name, member_of_stack(name)[0])}
    for name in source.index.file_of:
        if name not in replaced:
            yield name, source.stored(name)
    for number, (name, module) in enumerate(rounded.items()):
        note(number, len(rounded))
        parts = round_(source.tensor(f"{name}.weight", (module.rows, module.width)))
        yield from ((f"{name}.{suffix}", part) for suffix, part in parts.items())
    note(len(rounded), len(rounded))


class _ShardWriter:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, Tensor] = {}
        self._shards: list[tuple[str, ...]] = []
        self._num_bytes = self._held_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        self._tensors[name] = tensor.contiguous()
        self._held_bytes += tensor.nbytes
        if self._held_bytes >= _SHARD_BYTES:
            self._write()

    def finish(self) -> int:
        if self._tensors:
            self._write()
        count = len(self._shards)
        if count == 1:
            self._part(1).rename(self._folder / SINGLE_NAME)
            return self._num_bytes
        weight_map = {}
        for number, names in enumerate(self._shards, start=1):
            file = f"model-{number:05}-of-{count:05}.safetensors"
            self._part(number).rename(self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": weight_map}
        (self._folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
        return self._num_bytes

    def _write(self) -> None:
        self._shards.append(tuple(self._tensors))
        save_file(self._tensors, self._part(len(self._shards)), {"format": "pt"})
        self._num_bytes += self._held_bytes
        self._tensors, self._held_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"
