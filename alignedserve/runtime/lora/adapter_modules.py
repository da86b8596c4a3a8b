"""The modules of a model that adapters may change, and where each one's results lie in a fused product."""

from collections.abc import Iterator
from typing import NamedTuple

from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.families.table import FAMILIES
from alignedserve.runtime.model.weight_names import ParameterNames
from kernels.addend_layout import LayerProduct, ProductShape, up_column


class AdaptableModule(NamedTuple):
    """One module of one layer."""

    layer: int
    product: LayerProduct
    in_width: int
    num_rows: int  # of its weight
    first_column: int  # of its results in a row of addends
    interleaves_heads: bool = False  # its rows lie [num_heads, 3, head_dim]
    interleaves_pairs: bool = False  # the rows of a rotated pair are neighbours
    splits: bool = False  # its rows are gates and ups, which a row of addends has apart


def product_shapes(config: ModelConfig) -> tuple[ProductShape, ...]:
    """Return the shapes of a layer's products, in the order of LayerProduct."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return (
        ProductShape(hidden, config.query_width + 2 * config.kv_width),
        ProductShape(config.query_width, hidden),
        ProductShape(hidden, inner, config.is_gated),
        ProductShape(inner, hidden),
    )


def adaptable_modules(config: ModelConfig) -> dict[str, AdaptableModule]:
    """Return the modules by their full names, under every prefix that files of this family use."""
    names = FAMILIES[config.family].names
    return {
        prefix + names.layer.format(layer=layer) + name: module
        for layer in range(config.num_layers)
        for name, module in _modules(config, names, layer)
        for prefix in names.prefixes
    }


def _modules(config: ModelConfig, names: ParameterNames, layer: int) -> Iterator[tuple[str, AdaptableModule]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    widths = (config.query_width, config.kv_width, config.kv_width)
    if len(names.qkv) == 1:
        yield names.qkv[0], AdaptableModule(layer, LayerProduct.QKV, hidden, sum(widths), 0, names.interleaves_heads)
    else:
        for index, (name, width) in enumerate(zip(names.qkv, widths, strict=True)):
            is_paired = names.interleaves_pairs and index < 2  # queries and keys
            yield (
                name,
                AdaptableModule(
                    layer, LayerProduct.QKV, hidden, width, sum(widths[:index]), interleaves_pairs=is_paired
                ),
            )
    yield names.output, AdaptableModule(layer, LayerProduct.OUTPUT, config.query_width, hidden, 0)
    if config.experts_of(layer) is not None:
        return
    if len(names.gate_up) == 1:
        num_rows = inner * (2 if config.is_gated else 1)
        up = AdaptableModule(layer, LayerProduct.GATE_UP, hidden, num_rows, 0, splits=config.is_gated)
        yield names.gate_up[0], up
    else:
        for name, column in zip(names.gate_up, (0, up_column(inner)), strict=True):
            yield name, AdaptableModule(layer, LayerProduct.GATE_UP, hidden, inner, column)
    yield names.down, AdaptableModule(layer, LayerProduct.DOWN, inner, hidden, 0)
