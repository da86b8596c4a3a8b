"""The passes of MobileNet-V5, in steps between which other work may be done.

What a step leaves is a map [rows, columns, channels]. Products of single places run over some of these at a time, and
convolutions over bands of rows: what they compute does not depend on that.
"""

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from alignedserve.runtime.model.weights.safetensors_source import SafetensorsSource
from alignedserve.runtime.model.weights.weight_source import RandomSource, WeightSource
from kernels.activation import RmsNorm
from kernels.linear import Linear
from plugins.vision.decoder import Pixels
from plugins.vision.mobile_config import EdgeBlock, InvertedBlock, MobileConfig, PlacedBlock, QueryBlock
from plugins.vision.tower import Steps, scaled_pixels

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
    prefixes = (prefix for prefix in _PREFIXES if source.has(f"{prefix}{_TOWER}conv_stem.conv.weight"))
    prefix = next(prefixes, _PREFIXES[0])
    tower, connector = (
        {name: source.tensor(prefix + part + name, shape) for name, shape in shapes.items()}
        for part, shapes in ((_TOWER, config.tower_shapes()), (_CONNECTOR, config.connector_shapes()))
    )
    return MobileWeights(tower, connector)


_STEP_PRODUCTS = 1 << 28  # of numbers, after which a pass may stand still
_FEWEST_PLACES, _MOST_PLACES = 64, 2048  # of a step

Places = Callable[[Tensor], Tensor]  # of [places, channels]
MapSteps = Generator[None, None, Tensor]
BlockPass = Callable[[Tensor], MapSteps]


class MobileTower:
    """A tower ready to run."""

    def __init__(self, config: MobileConfig, weights: MobileWeights) -> None:
        self.config = config
        parts = _Parts(weights.tower, config.block_eps)
        self._stem = parts.convolved("conv_stem", stride=2, is_active=True)
        self._stages = [[parts.block(placed) for placed in config.blocks(stage)] for stage in range(len(config.stages))]
        self._fused, self._map_norm = parts.block(config.fused), parts.norm("msfa.norm")
        tensors, eps = weights.connector, config.eps
        self._norm = RmsNorm(tensors["soft_embedding_norm.weight"], eps, tensors["soft_embedding_norm.weight"].dtype)
        self._product = Linear(tensors["embedding_projection.weight"])
        mark = tensors["embedding.weight"][config.end_mark : config.end_mark + 1]
        ones = torch.ones(config.out_width, dtype=mark.dtype, device=mark.device)
        self._unit_norm = RmsNorm(ones, eps, ones.dtype)
        hard = RmsNorm(tensors["hard_embedding_norm.weight"], eps, mark.dtype)
        self._end = self._unit_norm(self._product(hard(mark)))  # [1, out_width]
        self._place = (mark.device, mark.dtype)

    def steps(self, pixels: Pixels) -> Steps:
        """Compute one picture [channels, height, width] -> [tokens, out_width], in steps of milliseconds."""
        return self.tokens((yield from self.map_steps(pixels)))

    def map_steps(self, pixels: Pixels) -> Steps:
        """Compute the map of a picture [places, hidden_size] likewise."""
        values = scaled_pixels(pixels, self.config.form.scaling).to(*self._place)
        hidden = yield from self._stem(values.permute(1, 2, 0))
        maps = []
        for blocks in self._stages:
            for block in blocks:
                hidden = yield from block(hidden)
            maps.append(hidden)
        fine, coarse = maps[-2:]
        resized = functional.interpolate(_as_batch(coarse), size=fine.shape[:2], mode="nearest")
        hidden = yield from self._fused(torch.cat((fine, _as_map(resized)), -1))
        pooled = _as_map(functional.avg_pool2d(_as_batch(hidden), hidden.shape[0] // self.config.map_edge))
        return self._map_norm(pooled.flatten(0, 1).contiguous())

    def tokens(self, places: Tensor) -> Tensor:
        """Make prompt tokens of the map, and the end mark."""
        soft = places * math.sqrt(self.config.hidden_size)
        return torch.cat((self._unit_norm(self._product(self._norm(soft))), self._end))


class _Parts:
    def __init__(self, tensors: Mapping[str, Tensor], eps: float) -> None:
        self._tensors, self._eps = tensors, eps

    def norm(self, name: str) -> RmsNorm:
        weight = self._tensors[f"{name}.weight"]
        return RmsNorm(weight, self._eps, weight.dtype)

    def product(self, name: str) -> Linear:
        return Linear(self._tensors[f"{name}.weight"].flatten(1))

    def convolved(self, name: str, *, stride: int, is_active: bool) -> BlockPass:
        kernel, bias = self._tensors[f"{name}.conv.weight"], self._tensors.get(f"{name}.conv.bias")
        return _convolution(kernel, bias, stride, self.norm(f"{name}.bn"), is_active=is_active)

    def block(self, placed: PlacedBlock) -> BlockPass:
        prefix, block, in_width, _ = placed
        is_kept = block.stride == 1 and in_width == block.width
        if isinstance(block, EdgeBlock):
            return self._edge_block(prefix, block, is_kept=is_kept)
        if isinstance(block, InvertedBlock):
            return self._inverted_block(prefix, block, is_kept=is_kept and block.is_scaled)
        return self._query_block(prefix, block, is_kept=is_kept)

    def _edge_block(self, prefix: str, block: EdgeBlock, *, is_kept: bool) -> BlockPass:
        kernel, norm = self._tensors[f"{prefix}conv_exp.weight"], self.norm(f"{prefix}bn1")
        widened = _convolution(kernel, None, block.stride, norm, is_active=True)
        narrow, last = self.product(f"{prefix}conv_pwl"), self.norm(f"{prefix}bn2")

        def run(hidden: Tensor) -> MapSteps:
            wide = yield from widened(hidden)
            added = yield from _by_places(wide, lambda places: last(narrow(places)), _num(narrow))
            return added.add_(hidden) if is_kept else added

        return run

    def _inverted_block(self, prefix: str, block: InvertedBlock, *, is_kept: bool) -> BlockPass:
        first = middle = None
        if block.first:
            stride = 1 if block.middle else block.stride
            first = self.convolved(f"{prefix}dw_start", stride=stride, is_active=False)
        if block.middle:
            middle = self.convolved(f"{prefix}dw_mid", stride=block.stride, is_active=True)
        wide, wide_norm = self.product(f"{prefix}pw_exp.conv"), self.norm(f"{prefix}pw_exp.bn")
        narrow, narrow_norm = self.product(f"{prefix}pw_proj.conv"), self.norm(f"{prefix}pw_proj.bn")
        factors = self._tensors.get(f"{prefix}layer_scale.gamma")

        def widened(places: Tensor) -> Tensor:
            return _active(wide_norm(wide(places)))

        def narrowed(places: Tensor) -> Tensor:
            added = narrow_norm(narrow(places))
            return added if factors is None else added.mul_(factors)

        def run(hidden: Tensor) -> MapSteps:
            inner = hidden if first is None else (yield from first(hidden))
            if middle is None:
                added = yield from _by_places(inner, lambda places: narrowed(widened(places)), _num(wide, narrow))
            else:
                inner = yield from _by_places(inner, widened, _num(wide))
                added = yield from _by_places((yield from middle(inner)), narrowed, _num(narrow))
            return added.add_(hidden) if is_kept else added

        return run

    def _query_block(self, prefix: str, block: QueryBlock, *, is_kept: bool) -> BlockPass:
        norm, query = self.norm(f"{prefix}norm"), self.product(f"{prefix}attn.query.proj")
        key, value = (self._keys(f"{prefix}attn.{part}", block) for part in ("key", "value"))
        output, factors = self.product(f"{prefix}attn.output.proj"), self._tensors[f"{prefix}layer_scale.gamma"]
        shape = (block.num_heads, block.head_dim)

        def run(hidden: Tensor) -> MapSteps:
            normed = yield from _by_places(hidden, norm, 1)
            keys = yield from key(normed)
            values = yield from value(normed)
            shared = (1, block.num_heads, -1, -1)  # one head's keys and values for all
            of_keys, of_values = (each.flatten(0, 1).expand(shared) for each in (keys, values))

            def attended(places: Tensor) -> Tensor:
                queries = query(places).view(-1, *shape).transpose(0, 1)[None]
                heads = functional.scaled_dot_product_attention(queries, of_keys, of_values)
                return output(heads[0].transpose(0, 1).flatten(1)).mul_(factors)

            added = yield from _by_places(normed, attended, _num(query, output) + 2 * block.num_heads * keys.numel())
            return added.add_(hidden) if is_kept else added

        return run

    def _keys(self, name: str, block: QueryBlock) -> BlockPass:
        product, fewer = self.product(f"{name}.proj"), None
        if block.key_stride > 1:
            kernel = self._tensors[f"{name}.down_conv.weight"]
            fewer = _convolution(kernel, None, block.key_stride, self.norm(f"{name}.norm"), is_active=False)

        def run(normed: Tensor) -> MapSteps:
            read = normed if fewer is None else (yield from fewer(normed))
            return (yield from _by_places(read, product, _num(product)))

        return run


def _by_places(hidden: Tensor, function: Places, num_products: int) -> MapSteps:
    rows, columns, channels = hidden.shape
    places, results, at_once = hidden.reshape(-1, channels), [], _places_at_once(num_products)
    for first in range(0, len(places), at_once):
        results.append(function(places[first : first + at_once]))
        yield
    return torch.cat(results).view(rows, columns, -1)


def _convolution(kernel: Tensor, bias: Tensor | None, stride: int, norm: RmsNorm, *, is_active: bool) -> BlockPass:
    """Return a convolution [channels, channels or 1, edge, edge] and its norm, by bands of rows.

    Zeros around the map leave one place for `stride` places; an odd zero goes below or to the right.
    """
    edge, groups = kernel.shape[-1], len(kernel) if kernel.shape[1] == 1 else 1
    kernel = kernel.contiguous(memory_format=torch.channels_last)
    at_once = _places_at_once(kernel.numel())

    def run(hidden: Tensor) -> MapSteps:
        rows, columns = (-(-count // stride) for count in hidden.shape[:2])
        around = [max((-(-count // stride) - 1) * stride + edge - count, 0) for count in hidden.shape[1::-1]]
        padding = [side for count in around for side in (count // 2, count - count // 2)]
        padded, bands = functional.pad(_as_batch(hidden), padding), []
        count = max(at_once // columns, 1)
        for first in range(0, rows, count):
            last = min(first + count, rows)
            band = padded[:, :, first * stride : (last - 1) * stride + edge]
            places = _as_map(functional.conv2d(band, kernel, bias, stride, groups=groups)).flatten(0, 1)
            normed = norm(places.contiguous())
            bands.append(_active(normed) if is_active else normed)
            yield
        return torch.cat(bands).view(rows, columns, -1)

    return run


def _num(*products: Linear) -> int:
    return sum(product.in_width * product.out_width for product in products)


def _places_at_once(num_products: int) -> int:
    return min(max(_STEP_PRODUCTS // num_products, _FEWEST_PLACES), _MOST_PLACES)


def _active(places: Tensor) -> Tensor:
    return functional.gelu(places, approximate="tanh")


def _as_batch(hidden: Tensor) -> Tensor:
    return hidden.permute(2, 0, 1)[None]


def _as_map(batch: Tensor) -> Tensor:
    return batch[0].permute(1, 2, 0)
