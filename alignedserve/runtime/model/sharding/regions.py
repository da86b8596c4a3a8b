"""The part of each tensor that a rank reads, by the tensor's name."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.sharding.tensor_shard import Span, TensorShard
from alignedserve.runtime.model.weight_names import ParameterNames, find_head, find_prefix


class Region(NamedTuple):
    """A part of a matrix [rows, width], or of a vector [rows]."""

    num_rows: int  # of the whole
    width: int | None  # of the whole; None: a vector
    rows: tuple[Span, ...]  # one after another
    columns: Span | None = None  # None: all
    is_held: bool = True  # False: another rank has it, and this one zeros

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_rows,) if self.width is None else (self.num_rows, self.width)


def shard_regions(
    config: ModelConfig, names: ParameterNames, has: Callable[[str], bool], shard: TensorShard
) -> dict[str, Region]:
    """Return the regions of tensors that the rank reads in part. `config` of the whole model; `has`: a tensor
    exists."""
    return dict(_ModelRegions(config, names, has, shard).regions())


def tensor_region(tensor: Tensor, region: Region) -> Tensor:
    part = chosen_rows(tensor, region)
    if region.columns is not None:
        part = part[:, region.columns.start : region.columns.stop]
    return part.clone(memory_format=torch.contiguous_format) if region.is_held else torch.zeros_like(part)


def chosen_rows(rows: Tensor, region: Region) -> Tensor:
    """Return the region's rows of a tensor that has all; a view where they lie one after another."""
    parts = [rows[span.start : span.stop] for span in region.rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _ModelRegions:
    def __init__(
        self, config: ModelConfig, names: ParameterNames, has: Callable[[str], bool], shard: TensorShard
    ) -> None:
        self._config, self._names, self._has, self._shard = config, names, has, shard

    def regions(self) -> Iterator[tuple[str, Region]]:
        config, names = self._config, self._names
        prefix = find_prefix(names, self._has)
        tokens = (self._shard.tokens(config),)
        for name in (prefix + names.embedding, find_head(names, self._has)):
            yield f"{name}.weight", Region(config.vocab_size, config.embedding_size, tokens)
        for layer in range(config.num_layers):
            yield from self._layer(prefix + names.layer.format(layer=layer), layer)

    def _layer(self, prefix: str, layer: int) -> Iterator[tuple[str, Region]]:
        config, names = self._config, self._names
        qkv = [prefix + name for name in names.qkv]
        yield from _by_rows(qkv, self._qkv_spans(), self._qkv_widths(), config.hidden_size)
        queries = self._shard.heads(config).times(config.head_dim)
        yield from self._by_columns(prefix + names.output, config.query_width, queries)
        experts = config.experts_of(layer)
        if experts is None:
            modules = [prefix + name for name in names.gate_up]
            yield from self._feed_forward(modules, prefix + names.down, config.intermediate_size)
            return
        for index in range(experts.num_experts):
            modules = [prefix + name.format(expert=index) for name in names.expert_gate_up]
            down = prefix + names.expert_down.format(expert=index)
            yield from self._feed_forward(modules, down, experts.intermediate_size)
        if experts.shared_size:
            modules = [prefix + name for name in names.shared_gate_up]
            yield from self._feed_forward(modules, prefix + names.shared_down, experts.shared_size)

    def _qkv_spans(self) -> list[Span]:
        config, shard = self._config, self._shard
        if self._names.interleaves_heads:  # queries, keys and values of a head follow each other
            return [shard.heads(config).times(3 * config.head_dim)]
        keys = shard.kv_heads(config).times(config.head_dim)
        return [shard.heads(config).times(config.head_dim), keys, keys]

    def _qkv_widths(self) -> list[int]:
        config = self._config
        if self._names.interleaves_heads:
            return [3 * config.query_width]
        return [config.query_width, config.kv_width, config.kv_width]

    def _feed_forward(self, gate_up: Sequence[str], down: str, width: int) -> Iterator[tuple[str, Region]]:
        config, inner = self._config, self._shard.inner(width)
        parts = 2 if config.is_gated else 1
        yield from _by_rows(gate_up, [inner] * parts, [width] * parts, config.hidden_size)
        yield from self._by_columns(down, width, inner)

    def _by_columns(self, module: str, width: int, columns: Span) -> Iterator[tuple[str, Region]]:
        rows = self._config.hidden_size
        yield f"{module}.weight", Region(rows, width, (Span(0, rows),), columns)
        yield f"{module}.bias", Region(rows, None, (Span(0, rows),), is_held=self._shard.rank == 0)


def _by_rows(
    modules: Sequence[str], spans: Sequence[Span], widths: Sequence[int], in_width: int
) -> Iterator[tuple[str, Region]]:
    """Yield weights and biases of modules with a part each, or of a single module with all parts; `widths`: rows of
    whole parts."""
    if len(modules) == len(spans):
        parts: list[tuple[int, tuple[Span, ...]]] = [
            (width, (span,)) for width, span in zip(widths, spans, strict=True)
        ]
    else:
        starts = [sum(widths[:index]) for index in range(len(widths))]
        moved = (Span(start + span.start, start + span.stop) for start, span in zip(starts, spans, strict=True))
        parts = [(sum(widths), tuple(moved))]
    for module, (num_rows, rows) in zip(modules, parts, strict=True):
        yield f"{module}.weight", Region(num_rows, in_width, rows)
        yield f"{module}.bias", Region(num_rows, None, rows)
