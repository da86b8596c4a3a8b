"""Chooses whether layers with a window keep all keys and values of a context, or those of the window alone.

See BlockLayout.with_rings, and docs/decisions/0081-windows-that-forget.md.
"""

from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.model_shapes import rings_pay
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.encoder.encoder_config import EncoderConfig

AUTO, WHOLE, RING = "auto", "whole", "ring"
_CPU = "cpu"
_BLOCK_SIZE = 16  # tokens: larger blocks change nothing that matters here


def has_rings(
    choice: str,
    config: ModelConfig | EncoderConfig,
    cache_dtype: str,
    max_context_len: int,
    *,
    device: str = _CPU,
    num_processes: int = 1,
) -> bool:
    """Return whether layers with a window keep no more than it. `choice`: as in engine.window_cache.

    Raises ConfigError where rings are asked for and cannot be.
    """
    obstacle = _obstacle(config, num_processes)
    if choice == RING and obstacle is not None:
        raise no_rings(obstacle)
    if choice == WHOLE or obstacle is not None or isinstance(config, EncoderConfig):
        return False
    if choice == RING:
        return True
    whole, is_on_cpu = config.block_layout(_BLOCK_SIZE, cache_dtype), device.startswith(_CPU)  # see decision 81
    return is_on_cpu and rings_pay(whole, config.layout_of_rings(whole), max_context_len)


def no_rings(obstacle: str) -> ConfigError:
    """Return the error of rings that are asked for and cannot be."""
    return ConfigError(f"engine.window_cache=ring: {obstacle}; leave it at auto")


def _obstacle(config: ModelConfig | EncoderConfig, num_processes: int) -> str | None:
    if isinstance(config, EncoderConfig) or not config.may_have_rings:
        return "this model has no layers with a window beside plain ones without, all with the same heads"
    return "the ranks and stages of a worker have none" if num_processes > 1 else None
