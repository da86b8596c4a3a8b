"""The passes of an encoder of pictures, in steps between which other work may be done."""

from collections.abc import Generator

import torch
from torch import Tensor
from torch.nn import functional

from plugins.vision.decoder import Pixels
from plugins.vision.forms import Scaling
from plugins.vision.vision_config import PositionKind, VisionConfig
from plugins.vision.vision_weights import Connector, VisionLayer, VisionWeights


def scaled_pixels(pixels: Pixels, scaling: Scaling) -> Tensor:
    if scaling.is_short:
        values = torch.from_numpy(pixels.copy()).to(torch.bfloat16) * scaling.rescale
    else:  # float64 once, then float32
        values = (torch.from_numpy(pixels.copy()).double() * scaling.rescale).float()
    mean, deviation = (
        torch.tensor(rgb, dtype=values.dtype)[:, None, None] for rgb in (scaling.mean, scaling.deviation)
    )
    return (values - mean) / deviation


_STEP_ROWS = 256  # of a product, after which a pass may stand still

Steps = Generator[None, None, Tensor]
Rotation = tuple[Tensor, Tensor]


class VisionTower:
    """A tower ready to run. A part of a picture is computed by itself, so that its result depends on nothing else."""

    def __init__(self, config: VisionConfig, weights: VisionWeights, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype`, `device`: of the weights."""
        self.config = config
        self._weights = weights
        self._dtype, self._device = dtype, device

    def steps(self, pixels: Pixels) -> Steps:
        """Compute one part [channels, height, width] -> [tokens, embedding_width], in steps of milliseconds."""
        weights, (patches, rows, columns) = self._weights, self._patches(pixels)
        hidden = weights.patches(patches)
        if weights.class_token is not None:
            hidden = torch.cat((hidden, weights.class_token))
        if weights.positions is not None:
            hidden = hidden + self._positions(weights.positions, rows, columns)
        if weights.first_norm is not None:
            hidden = weights.first_norm(hidden)
        rotation = self._rotation(rows, columns)
        yield
        windows = self._windows(rows, columns)
        deep: list[Tensor] = []
        for number, layer in enumerate(weights.layers):
            is_full = windows is None or number in self.config.full_layers
            yield from self._run_layer(hidden, layer, rotation, None if is_full else windows)
            if number in self.config.deep_layers:
                connector = weights.deep[self.config.deep_layers.index(number)]
                deep.append(self._connected(hidden, rows, columns, connector, joins=True))
                yield
        hidden = hidden if weights.last_norm is None else weights.last_norm(hidden)
        hidden = hidden[: rows * columns]  # without the class token
        tokens = self._connected(hidden, rows, columns, weights.connector, joins=self.config.norms_joined)
        return torch.cat((tokens, *deep), 1) if deep else tokens

    def _connected(self, hidden: Tensor, rows: int, columns: int, connector: Connector, *, joins: bool) -> Tensor:
        config = self.config
        if connector.norm is not None and not joins:
            hidden = connector.norm(hidden)
        if config.is_pooled:
            hidden = _pooled(hidden, rows, columns, config.join).mul_(config.pooled_scale)
            if self._weights.standard is not None:
                lost, factor = self._weights.standard
                hidden = hidden.sub_(lost).mul_(factor)
        else:
            hidden = _joined(hidden, rows, columns, config.join, by_channel=config.joins_channels)
        if connector.norm is not None and joins:
            hidden = connector.norm(hidden)
        if connector.merger is not None:
            hidden = connector.merger(hidden)
        for product in connector.products:
            hidden = product(hidden)
        return hidden

    def _patches(self, pixels: Pixels) -> tuple[Tensor, int, int]:
        edge = self.config.patch_size
        values = scaled_pixels(pixels, self.config.form.scaling).to(self._device, self._dtype)
        channels, height, width = values.shape
        rows, columns = height // edge, width // edge
        values = values[:, : rows * edge, : columns * edge].reshape(channels, rows, edge, columns, edge)
        return values.permute(1, 3, 0, 2, 4).reshape(rows * columns, -1), rows, columns

    def _positions(self, table: Tensor, rows: int, columns: int) -> Tensor:
        kind, sides = self.config.positions, self.config.num_sides
        assert sides is not None, "a tower without a table of positions"
        if kind is PositionKind.EACH:
            assert rows == columns == sides, "a part of another size than the table"
            return table
        if kind is PositionKind.AXES:
            by_column, by_row = table[0, :columns], table[1, :rows]
            return (by_column[None] + by_row[:, None]).flatten(0, 1)
        if kind is PositionKind.BUCKETS:
            return table.index_select(0, self._places(rows, columns))
        (down, down_weights), (across, across_weights) = (_between(count, sides) for count in (rows, columns))
        places = down[:, None, :, None] * sides + across[None, :, None, :]
        weights = down_weights[:, None, :, None] * across_weights[None, :, None, :]
        of_patches = table[places.reshape(rows * columns, -1).to(self._device)]
        own_weights = weights.reshape(rows * columns, -1, 1).to(self._device)
        return (of_patches * own_weights).sum(1).to(table.dtype)

    def _places(self, rows: int, columns: int) -> Tensor:
        sides = self.config.num_sides
        assert sides is not None, "a tower without a table of positions"
        boundaries = torch.arange(1 / sides, 1.0, 1 / sides)
        down, across = (_buckets(count, boundaries) for count in (rows, columns))
        return (down[:, None] * sides + across[None, :]).reshape(-1).to(self._device)

    def _rotation(self, rows: int, columns: int) -> Rotation | None:
        theta, width = self.config.rope_theta, self.config.head_dim
        if theta is None:
            return None
        frequencies = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        first = self.config.first_place
        down, across = (torch.arange(first, first + count, dtype=torch.float32) for count in (rows, columns))
        of_columns = frequencies[0::2] if self.config.shares_frequencies else frequencies[1::2]
        by_row = (down[:, None, None] * frequencies[0::2]).expand(rows, columns, -1)
        by_column = (across[None, :, None] * of_columns).expand(rows, columns, -1)
        angles = torch.cat((by_row, by_column), -1).reshape(rows * columns, -1)
        if self.config.names.class_token:  # which is not rotated
            angles = torch.cat((angles, torch.zeros(1, angles.shape[1])))
        return angles.cos().to(self._device, self._dtype), angles.sin().to(self._device, self._dtype)

    def _windows(self, rows: int, columns: int) -> list[Tensor] | None:
        edge = self.config.window_edge
        if edge is None:
            return None
        places = torch.arange(rows * columns, device=self._device).view(rows, columns)
        bands = [places[first : first + edge] for first in range(0, rows, edge)]
        return [band[:, first : first + edge].reshape(-1) for band in bands for first in range(0, columns, edge)]

    def _run_layer(
        self, hidden: Tensor, layer: VisionLayer, rotation: Rotation | None, windows: list[Tensor] | None
    ) -> Generator[None, None, None]:
        normed, heads = layer.attention_norm(hidden), self.config.num_heads
        fused = []
        for first in range(0, len(hidden), _STEP_ROWS):
            fused.append(layer.qkv(normed[first : first + _STEP_ROWS]))
            yield
        shape = (3, heads, self.config.head_dim)
        queries, keys, values = torch.cat(fused).view(-1, *shape).permute(1, 2, 0, 3)
        if layer.head_norms is not None:
            queries, keys, values = (
                norm(vectors) for norm, vectors in zip(layer.head_norms, (queries, keys, values), strict=True)
            )
        if rotation is not None:
            queries, keys = _rotated(queries, rotation), _rotated(keys, rotation)
        for window in windows or ():
            windowed = (each[None, :, window] for each in (queries, keys, values))
            hidden[window] += self._attended(layer, *windowed)
            yield
        for first in range(0, len(hidden) if windows is None else 0, _STEP_ROWS):
            part = slice(first, first + _STEP_ROWS)
            hidden[part] += self._attended(layer, queries[None, :, part], keys[None], values[None])
            yield
        for first in range(0, len(hidden), _STEP_ROWS):
            rows = hidden[first : first + _STEP_ROWS]
            added = layer.mlp(layer.mlp_norm(rows))
            rows += added if layer.mlp_post_norm is None else layer.mlp_post_norm(added)
            yield

    def _attended(self, layer: VisionLayer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        scale = self.config.score_scale
        attended = functional.scaled_dot_product_attention(queries, keys, values, scale=scale)
        added = layer.output(attended[0].transpose(0, 1).reshape(-1, self.config.hidden_size))
        return added if layer.attention_post_norm is None else layer.attention_post_norm(added)


def _buckets(count: int, boundaries: Tensor) -> Tensor:
    places = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
    return torch.bucketize(places.clamp(max=1.0 - 1e-6), boundaries, right=True)


def _between(count: int, sides: int) -> tuple[Tensor, Tensor]:
    places = torch.arange(count, dtype=torch.float32) * (sides - 1) / max(count - 1, 1)
    below = torch.floor(places)
    weight = places - below
    neighbours = torch.stack((below, below + 1), 1).long().clamp(max=sides - 1)
    return neighbours, torch.stack((1.0 - weight, weight), 1)


def _rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    cosines, sines = rotation
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)


def _pooled(hidden: Tensor, rows: int, columns: int, edge: int) -> Tensor:
    grid = hidden.view(rows, columns, -1).permute(2, 0, 1)
    return functional.avg_pool2d(grid[None], edge)[0].flatten(1).t().contiguous()


def _joined(hidden: Tensor, rows: int, columns: int, edge: int, *, by_channel: bool) -> Tensor:
    grid = hidden.view(rows // edge, edge, columns // edge, edge, -1)
    order = (0, 2, 4, 1, 3) if by_channel else (0, 2, 1, 3, 4)
    return grid.permute(order).reshape(rows * columns // edge**2, -1)
