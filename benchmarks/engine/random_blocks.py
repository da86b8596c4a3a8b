"""Random weights in the blocks of GGUF files, of a named shape, for measurements without a file."""

import math

import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.core.errors import ConfigError
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.weights.decoder_weights import DecoderWeights
from alignedserve.runtime.model.weights.packed_products import BLOCK_DTYPES, BlockRows
from alignedserve.runtime.model.weights.weight_loader import assemble_weights
from alignedserve.runtime.model.weights.weight_source import WeightSource
from kernels.block_formats import BLOCK_FORMATS
from kernels.cpu.block_quantized_linear import BlockQuantizedLinear, JoinedLinear, block_levels

BLOCK_TYPES = tuple(name for name, layout in BLOCK_FORMATS.items() if layout.scale_bytes == 2)  # those of files


def random_block_weights(config: ModelConfig, seed: int, dtype: torch.dtype, type_name: str) -> DecoderWeights:
    """Make random weights, all matrices of products in blocks of this type.

    Raises ConfigError where no such products are computed: in another dtype, of rows that are not whole blocks, or
    without the native kernels.
    """
    obstacle = _obstacle(config, dtype, type_name)
    if obstacle is not None:
        raise ConfigError(f"quantization {type_name}: {obstacle}.")
    source = _RandomBlocks(seed, dtype, type_name)
    return assemble_weights(config, source)


def block_bytes(weights: DecoderWeights) -> int | None:
    """Return the bytes that a step reads of weights that are all in blocks; None: some are not."""
    products = (*weights.layer_projections, weights.lm_head)
    sizes = [product.num_bytes for product in products if isinstance(product, BlockQuantizedLinear | JoinedLinear)]
    return sum(sizes) if len(sizes) == len(products) and all(sizes) else None


def _obstacle(config: ModelConfig, dtype: torch.dtype, type_name: str) -> str | None:
    if not block_levels():
        return "the native kernels are not built"
    if dtype not in BLOCK_DTYPES:
        return "products in blocks are computed in float32 or bfloat16"
    size = BLOCK_FORMATS[type_name].num_values
    widths = (config.hidden_size, config.query_width, config.intermediate_size, config.embedding_size)
    uneven = next((width for width in widths if width % size), None)
    return None if uneven is None else f"rows of {uneven} values are not whole blocks of {size}"


class _RandomBlocks(WeightSource):
    """A source of any name and shape: norms are 1, biases 0, quants any bits, scales as small as files have."""

    def __init__(self, seed: int, dtype: torch.dtype, type_name: str) -> None:
        super().__init__(dtype, torch.device("cpu"))
        self._type_name = type_name
        self._generator = torch.Generator().manual_seed(seed)

    @override
    def has(self, name: str) -> bool:
        return not name.startswith("decoder.")

    @override
    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith(".bias"):
            return torch.zeros(shape, dtype=self.dtype)
        if len(shape) == 1:
            return torch.ones(shape, dtype=self.dtype)
        values = torch.empty(shape, dtype=self.dtype)
        return values.normal_(0.0, 1.0 / math.sqrt(shape[1]), generator=self._generator)

    @override
    def packed(self, name: str, shape: tuple[int, ...]) -> BlockRows:
        rows, width = shape
        layout = BLOCK_FORMATS[self._type_name]
        num_blocks = rows * layout.row_bytes(width) // layout.num_bytes
        raw = torch.randint(0, 256, (num_blocks, layout.num_bytes), dtype=torch.uint8, generator=self._generator)
        for place in layout.scale_places:
            scales = torch.randn(num_blocks, 1, generator=self._generator).mul_(0.1 / math.sqrt(width)).half()
            raw[:, place : place + 2] = scales.view(torch.uint8)
        return BlockRows(raw.reshape(rows, -1), self._type_name, width)
