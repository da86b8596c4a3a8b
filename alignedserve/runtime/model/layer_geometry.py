"""The sizes of single layers, which differ in some families."""

from alignedserve.runtime.model.layer_extras import HeadSizes
from alignedserve.runtime.model.model_config import ModelConfig


def heads_of(config: ModelConfig, layer: int) -> HeadSizes:
    """Return the keys and values of a layer, which the cache may have in wider rows."""
    if config.extras is None:
        return HeadSizes(config.num_kv_heads, config.head_dim)
    return config.extras.heads(is_windowed=layer in config.windowed_layers)


def inner_size(config: ModelConfig, layer: int) -> int:
    """Return the width of a layer's feed-forward part."""
    sizes = () if config.extras is None else config.extras.inner_sizes
    return sizes[layer] if sizes else config.intermediate_size


def cache_source(config: ModelConfig, layer: int) -> int:
    """Return the layer whose keys and values a layer reads: its own, or those of the last before it of its kind."""
    cached = config.cached_layers
    if layer in cached:
        return layer
    is_windowed = layer in config.windowed_layers
    return max(own for own in cached if (own in config.windowed_layers) is is_windowed)
