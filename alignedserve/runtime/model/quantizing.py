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
from alignedserve.runtime.model.model_files import MAX_CONFIG_BYTES, read_model_config
from alignedserve.runtime.model.quantized.layout import BLOCK, block_type, member_of_stack
from alignedserve.runtime.model.weight_index import INDEX_NAME, SINGLE_NAME
from alignedserve.runtime.model.weight_names import LinearModule, find_head, find_prefix, linear_modules
from alignedserve.runtime.model.weights.safetensors_source import SafetensorsSource
from alignedserve.text.tokenizer_files import MORE_TEMPLATES
from kernels.block_values import FLOATS_OF_4_BITS

_FLOATS = torch.from_numpy(FLOATS_OF_4_BITS)
_SHARD_BYTES = 2 << 30
_COPIED = (".json", ".jinja", ".model", ".txt")

Round = Callable[[Tensor], dict[str, Tensor]]
Note = Callable[[int, int], None]  # of matrices that are done, and all
_TRIES = 21  # scales for each block of Q4
_TINY = 1e-12


def _in_blocks(values: Tensor) -> Tensor:
    return values.float().reshape(len(values), -1, BLOCK)


def to_int8(values: Tensor) -> dict[str, Tensor]:
    """Round values [rows, width]: words of 4 bytes, each plus 128, and a float16 scale for every 32."""
    blocks = _in_blocks(values)
    scales = (blocks.abs().amax(-1) / 127.0).half()
    quants = (blocks / scales.float().clamp_min(_TINY)[..., None]).round_().clamp_(-128, 127)
    words = (quants + 128).to(torch.uint8).flatten(1).contiguous().view(torch.int32)
    return {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor(values.shape)}


def to_mxfp4(values: Tensor) -> dict[str, Tensor]:
    """Round values [rows, width] to floats of 4 bits, two a byte, with a power of two for every 32: the largest
    becomes 4 to 6, or half of that where less is lost."""
    blocks = _in_blocks(values)
    lowest = blocks.abs().amax(-1).clamp_min(2.0**-120).log2().floor().sub_(2.0)
    tries = [(lowest + more, _floats_of_4_bits(blocks, lowest + more)) for more in (0.0, 1.0)]
    errors = [(_of_4_bits(codes, powers) - blocks).square_().sum(-1) for powers, codes in tries]
    is_first = errors[0] <= errors[1]
    powers = torch.where(is_first, tries[0][0], tries[1][0])
    codes = torch.where(is_first[..., None], tries[0][1], tries[1][1]).flatten(1)
    return {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": (powers + 127).to(torch.uint8)}


def _floats_of_4_bits(blocks: Tensor, powers: Tensor) -> Tensor:
    magnitudes = _FLOATS[:8]  # the others are negative
    between = (magnitudes[1:] + magnitudes[:-1]) / 2
    scaled = blocks / powers.exp2()[..., None]
    return torch.bucketize(scaled.abs(), between).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3


def _of_4_bits(codes: Tensor, powers: Tensor) -> Tensor:
    return _FLOATS[codes.long()] * powers.exp2()[..., None]


def to_blocks(values: Tensor) -> dict[str, Tensor]:
    """Round values [rows, width] to blocks of `block_type`, as GGUF files have them: uint8 [rows, bytes of a row]."""
    blocks = _in_blocks(values)
    scales, minima = _best_scales(blocks)
    rows = _q4_k(blocks, scales, minima) if block_type(values.shape[1]) == "Q4_K" else _q4_1(blocks, scales, minima)
    return {"weight": rows}


def _best_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    weights = blocks.square().mean(-1, keepdim=True).sqrt_() + blocks.abs()
    low, high = blocks.amin(-1).clamp_(max=0.0), blocks.amax(-1).clamp_(min=0.0)
    span = (high - low).clamp_min_(_TINY)
    scales, minima = span / 15.0, low
    least = _loss(blocks, weights, scales, minima)
    for index in range(_TRIES):
        quants = ((blocks - low[..., None]) * ((14.0 + 0.1 * index) / span)[..., None]).round_().clamp_(0, 15)
        own_scales, own_minima = _fitted(blocks, weights, quants)
        loss = _loss(blocks, weights, own_scales, own_minima)
        is_better = (loss < least) & (own_scales > 0)
        least = torch.where(is_better, loss, least)
        scales = torch.where(is_better, own_scales, scales)
        minima = torch.where(is_better, own_minima, minima)
    return scales, minima


def _fitted(blocks: Tensor, weights: Tensor, quants: Tensor) -> tuple[Tensor, Tensor]:
    w, l, ll = weights.sum(-1), (weights * quants).sum(-1), (weights * quants.square()).sum(-1)  # noqa: E741
    x, lx = (weights * blocks).sum(-1), (weights * quants * blocks).sum(-1)
    determinant = (w * ll - l.square()).clamp_min_(_TINY)
    scales, minima = (w * lx - x * l) / determinant, (ll * x - l * lx) / determinant
    is_above = minima > 0
    return torch.where(is_above, lx / ll.clamp_min(_TINY), scales), minima.clamp_(max=0.0)


def _loss(blocks: Tensor, weights: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    quants = _quants(blocks, scales, minima)
    return (weights * (quants * scales[..., None] + minima[..., None] - blocks).square()).sum(-1)


def _quants(blocks: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    return ((blocks - minima[..., None]) / scales.clamp_min(_TINY)[..., None]).round_().clamp_(0, 15)


def _q4_1(blocks: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    heads = torch.stack((scales, minima), dim=-1).half()
    own_scales, own_minima = heads.float().unbind(-1)
    quants = _quants(blocks, own_scales, own_minima).to(torch.uint8)
    return torch.cat((heads.view(torch.uint8), (quants[..., :16] | quants[..., 16:] << 4)), dim=-1).flatten(1)


def _q4_k(blocks: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    parts = [part.reshape(len(part), -1, 8) for part in (scales, -minima)]  # [rows, superblocks, 8]
    heads = torch.stack([part.amax(-1) / 63.0 for part in parts], dim=-1).half()
    small = [
        (part / head.clamp_min(_TINY)[..., None]).round_().clamp_(0, 63).to(torch.uint8)
        for part, head in zip(parts, heads.float().unbind(-1), strict=True)
    ]
    own_scales, own_minima = (
        (part.float() * head[..., None]).flatten(1) for part, head in zip(small, heads.float().unbind(-1), strict=True)
    )
    quants = _quants(blocks, own_scales, -own_minima).to(torch.uint8).view(len(blocks), -1, 4, 2, BLOCK)
    words = (quants[..., 0, :] | quants[..., 1, :] << 4).flatten(-2)
    first, last = [part[..., :4] for part in small], [part[..., 4:] for part in small]
    sixes = [before | after >> 4 << 6 for before, after in zip(first, last, strict=True)]
    fours = (last[0] & 15) | (last[1] & 15) << 4
    return torch.cat((heads.view(torch.uint8), *sixes, fours, words), dim=-1).flatten(1)


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
    """Round every matrix of the layers but routers', one at a time. Raises ConfigError for a form or an output,
    ModelError."""
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
        elif path.name == MORE_TEMPLATES and path.is_dir():
            shutil.copytree(path, output / path.name)
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
