"""Heads of layers that have others than the rest, fewer keys and values, or none of their own."""

import math
from functools import partial

import torch
from torch import Tensor

from alignedserve.runtime.engine.forward.pass_state import PassState
from alignedserve.runtime.model.decoder.model_config import ModelConfig, cache_source, cached_places
from kernels.rotary import HeadNorms, HeadPlacement, rotate_


class ExtraHeads:
    """Normalises, rotates and writes the heads of each layer in their own sizes."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._num_heads = config.num_heads
        self._of_layer = [config.heads_of(layer) for layer in range(config.num_layers)]
        self._places = {own: HeadPlacement(config.num_heads, *own, dtype, device) for own in set(self._of_layer)}
        sources = [cache_source(config, layer) for layer in range(config.num_layers)]
        self._source_of, self._cached = sources, cached_places(config)
        self._shared = frozenset(source for layer, source in enumerate(sources) if source != layer)

    def placed(
        self, fused: Tensor, norms: HeadNorms | None, layer: int, run: PassState
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer's queries, and the keys and values that it reads [tokens, width]; write those if they are its
        own.

        fused    [tokens, width]
        """
        own, rotation, source = self._of_layer[layer], run.rotations[layer], self._source_of[layer]
        assert norms is not None, "heads without norms"
        heads = fused.view(len(fused), -1, own.head_dim)
        counts = [self._num_heads] + ([own.num_kv_heads] * 2 if source == layer else [])
        norms.normalise_(*torch.split(heads, counts, dim=1))
        query_width = self._num_heads * own.head_dim
        if source == layer:
            kind, place = self._cached[layer]
            write = partial(self._places[own], fused, None, rotation)
            run.storage.kinds[kind].write(place, run.rows_of_kind(kind), write)
            keys, values = torch.split(fused[:, query_width:], own.num_kv_heads * own.head_dim, dim=1)
            if layer in self._shared:
                run.shared[layer] = keys, values
        elif rotation is not None:
            rotate_(heads, *rotation)
        queries = fused[:, :query_width].mul_(math.sqrt(own.head_dim))
        return queries, *((keys, values) if source == layer else run.shared[source])
