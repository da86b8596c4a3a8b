"""The matrices of an adapter: out of its files, in the order of the model's products."""

from collections import defaultdict
from typing import NamedTuple

import torch
from safetensors.torch import load
from torch import Tensor

from alignedserve.core.errors import AdapterError
from alignedserve.runtime.lora.adapter_check import (
    AdaptableModule,
    AdapterFiles,
    adaptable_modules,
    check_adapter,
    product_shapes,
)
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.families.table import FAMILIES
from alignedserve.runtime.model.sharding.layer_stages import LayerStage
from alignedserve.runtime.model.sharding.regions import Region, chosen_rows, shard_regions
from alignedserve.runtime.model.sharding.tensor_shard import TensorShard
from alignedserve.runtime.model.weights.product_reader import pairs_apart
from kernels.addend_layout import LayerProduct, ProductShape, site_of, up_column
from kernels.cpu.lora import LoraModule
from kernels.lora import AdapterMatrices


class _Matrices(NamedTuple):
    a: Tensor
    b: Tensor


def load_adapter(
    files: AdapterFiles,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_rank: int,
    shard: TensorShard | LayerStage | None = None,
) -> AdapterMatrices:
    """Return the matrices, ready to be multiplied by inputs of `dtype`; of a `shard`, what it adds to its products.
    `config` of the whole model. Raises AdapterError."""
    checked = check_adapter(files, config, max_rank=max_rank)
    tensors = load(files.weights)
    local = shard.local(config) if isinstance(shard, TensorShard) else config
    regions = _regions(config, shard) if isinstance(shard, TensorShard) else {}
    layers = range(shard.first, shard.end) if isinstance(shard, LayerStage) else range(config.num_layers)
    places = adaptable_modules(local)
    shapes = product_shapes(local)
    by_product: dict[tuple[int, LayerProduct], list[LoraModule]] = defaultdict(list)
    for name, (module, names) in checked.modules.items():
        a, b = tensors[names.a], tensors[names.b]
        if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
            raise AdapterError(f"{files.folder.name}: the matrices of {name} hold numbers that are not finite.")
        pair = _Matrices(a.float(), (b.double() * checked.config.scale_of(name)).float())
        if regions:
            pair = _part(pair, regions[f"{name}.weight"])
        by_product[module.layer, module.product] += _placed(places[name], pair, local)
    matrices = AdapterMatrices(shapes, len(layers), dtype, device)
    for (layer, product), modules in by_product.items():
        if layer in layers:
            matrices.set(site_of(layer - layers.start, product), _filled(modules, shapes[product]))
    return matrices


def _regions(config: ModelConfig, shard: TensorShard) -> dict[str, Region]:
    names, regions = FAMILIES[config.family].names, dict[str, Region]()
    for prefix in names.prefixes:
        embedding = f"{prefix}{names.embedding}.weight"
        regions |= shard_regions(config, names, embedding.__eq__, shard)
    return regions


def _part(pair: _Matrices, region: Region) -> _Matrices:
    a = pair.a if region.columns is None else pair.a[:, region.columns.start : region.columns.stop].contiguous()
    return _Matrices(a, chosen_rows(pair.b, region).contiguous())


def _placed(module: AdaptableModule, pair: _Matrices, config: ModelConfig) -> list[LoraModule]:
    a, b = pair
    if module.splits:
        half = module.num_rows // 2
        return [LoraModule(0, half, (a, b[:half])), LoraModule(up_column(half), half, (a, b[half:]))]
    if module.interleaves_heads:
        b = b.view(config.num_heads, 3, config.head_dim, -1).transpose(0, 1).reshape(b.shape)
    if module.interleaves_pairs:
        b = pairs_apart(b, config)
    return [LoraModule(module.first_column, module.num_rows, (a, b))]


def _filled(modules: list[LoraModule], shape: ProductShape) -> list[LoraModule]:
    filled: list[LoraModule] = []
    column = 0
    for module in sorted(modules, key=lambda part: part.first_column):
        if module.first_column > column:
            filled.append(LoraModule(column, module.first_column - column, None))
        filled.append(module)
        column = module.first_column + module.num_columns
    if column < shape.addend_width:
        filled.append(LoraModule(column, shape.addend_width - column, None))
    return filled
