"""The sizes of single layers, which differ in some families."""

from alignedserve.runtime.model.decoder.model_config import ModelConfig


def inner_size(config: ModelConfig, layer: int) -> int:
    sizes = () if config.extras is None else config.extras.inner_sizes
    return sizes[layer] if sizes else config.intermediate_size


def cache_source(config: ModelConfig, layer: int) -> int:
    """Return the layer whose keys and values a layer reads: its own, or those of the last before it of its kind."""
    cached = config.cached_layers
    if layer in cached:
        return layer
    is_windowed = layer in config.windowed_layers
    return max(own for own in cached if (own in config.windowed_layers) is is_windowed)


def cached_places(config: ModelConfig) -> dict[int, tuple[int, int]]:
    """Return the place in the cache of each layer that has one: its kind, and its place among those of it."""
    kinds = enumerate(config.cache_kinds.values())
    return {layer: (kind, place) for kind, layers in kinds for place, layer in enumerate(layers)}


def read_places(config: ModelConfig, *, has_rings: bool = False) -> dict[int, int]:
    """Return the place in the whole cache of the keys and values that each layer reads, of those that attend.

    `has_rings`: layers with a window, whose keys and values are in rings, come behind the others.
    """
    ordered = list(cached_places(config))
    if has_rings:
        ordered.sort(key=lambda layer: layer in config.windowed_layers)
    places = {layer: place for place, layer in enumerate(ordered)}
    return {layer: places[cache_source(config, layer)] for layer in config.attention_layers}
