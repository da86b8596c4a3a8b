"""Heads of layers that have others than the cache: narrower ones, fewer keys and values, or none of their own."""

import torch
from torch import Tensor

from alignedserve.runtime.engine.pass_state import PassState
from alignedserve.runtime.model.layer_geometry import cache_source, heads_of
from alignedserve.runtime.model.model_config import ModelConfig
from kernels.rotary import HeadNorms, HeadPlacement, rotate_


def cache_places(config: ModelConfig) -> dict[int, int]:
    """Return the place in the cache of the keys and values that each layer reads, of those that attend."""
    places = {layer: place for place, layer in enumerate(config.cached_layers)}
    return {layer: places[cache_source(config, layer)] for layer in config.attention_layers}


class ExtraHeads:
    """Makes rows of the cache's heads of a layer's own, and the other way round."""

    def __init__(self, config: ModelConfig, place: HeadPlacement) -> None:
        layers = range(config.num_layers)
        self._config, self._place = config, place
        self._cached = (config.num_kv_heads, config.head_dim)
        self._of_layer = [heads_of(config, layer) for layer in layers]
        self._source_of = [cache_source(config, layer) for layer in layers]
        self._shared = frozenset(source for layer, source in enumerate(self._source_of) if source != layer)

    def placed(
        self, fused: Tensor, norms: HeadNorms | None, layer: int, run: PassState, cached: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer's queries, and the keys and values that it reads [tokens, width].

        fused    [tokens, width] heads of the layer's own
        cached   the slots of its keys and of its values, written if it has some
        """
        config, rotation, source = self._config, run.rotations[layer], self._source_of[layer]
        assert norms is not None, "heads without norms"
        rows = self._widened(fused, norms, layer)
        if source == layer:
            self._place(rows, None, rotation, run.batch.slots, *cached)
            keys, values = torch.split(rows[:, config.query_width :], config.kv_width, dim=1)
            if layer in self._shared:
                run.shared[layer] = keys, values
        elif rotation is not None:
            rotate_(rows.view(len(rows), config.num_heads, config.head_dim), *rotation)
        queries = rows[:, : config.query_width].mul_(config.query_multiplier)
        return queries, *((keys, values) if source == layer else run.shared[source])

    def _widened(self, fused: Tensor, norms: HeadNorms, layer: int) -> Tensor:
        """Normalise heads in place; return them as wide and as many as the cache's.

        Behind narrower ones come zeros, which attention adds nothing for; fewer ones come several times.
        """
        kv_heads, head_dim = own = self._of_layer[layer]
        counts = [self._config.num_heads]
        counts += [kv_heads, kv_heads] if self._source_of[layer] == layer else []
        parts = torch.split(fused.view(len(fused), -1, head_dim), counts, dim=1)
        queries, *others = parts
        norms.normalise_(*parts)
        if own == self._cached:
            return fused
        repeats = self._cached[0] // kv_heads
        whole = torch.cat([queries, *(part.repeat_interleave(repeats, dim=1) for part in others)], dim=1)
        return torch.nn.functional.pad(whole, (0, self._cached[1] - head_dim)).flatten(1)

    def narrowed(self, attended: Tensor, layer: int) -> Tensor:
        """Return what a layer's queries have gathered [tokens, query_width] in heads of its own."""
        head_dim = self._of_layer[layer].head_dim
        if head_dim == self._cached[1]:
            return attended
        return attended.view(len(attended), self._config.num_heads, -1)[:, :, :head_dim].flatten(1)
