"""Cache memory beside a model."""

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.gpu_limits import REQUEST_TOKENS
from alignedserve.costmodel.hardware import Hardware
from alignedserve.costmodel.model_shapes import ModelShape

MEMORY_SHARE = (
    0.9  # of the device's memory that a server takes, vLLM's default; the rest is the driver's and libraries'
)
_LARGEST_SHARE = 0.6  # that the longest context takes of what it took, for rings to be chosen
_ACTIVATION_TOKENS = 8192  # of the largest pass that memory is kept for


def num_cache_blocks(
    shape: ModelShape,
    machine: Hardware,
    *,
    tensor_parallel: int = 1,
    block_size: int = 16,
    memory_share: float = MEMORY_SHARE,
) -> int:
    """Return the blocks of keys and values that a worker of `tensor_parallel` devices holds.

    Raises ConfigError when the model does not fit.

    memory_share * memory - weights - activations, by the bytes of a block; every device holds a part of each block.
    """
    free_bytes = tensor_parallel * memory_share * machine.memory_bytes - shape.weight_bytes - _activation_bytes(shape)
    num_blocks = int(free_bytes // (block_size * shape.kv_token_bytes))
    if num_blocks < 1:
        gib = 1 << 30
        raise ConfigError(
            f"model {shape.name!r} ({shape.weight_bytes / gib:.1f} GiB of weights) does not fit {tensor_parallel} x "
            f"{machine.name!r} ({machine.memory_bytes / gib:.1f} GiB); set tensor_parallel higher."
        )
    return num_blocks


def rings_pay(whole: BlockLayout, rings: BlockLayout, max_context_len: int) -> bool:
    """Return whether an ordinary request takes no more where layers with a window keep no more than it, and the longest
    far less. Both layouts are of one model, see BlockLayout.with_rings."""
    ordinary = rings.bytes_of(REQUEST_TOKENS) <= whole.bytes_of(REQUEST_TOKENS)
    return ordinary and rings.bytes_of(max_context_len) <= _LARGEST_SHARE * whole.bytes_of(max_context_len)


def _activation_bytes(shape: ModelShape) -> int:
    inner = max(shape.ffn_size, shape.num_chosen_experts * shape.expert_size)
    width = 2 * shape.hidden_size + (2 if shape.is_gated else 1) * inner
    return _ACTIVATION_TOKENS * width * shape.dtype_bytes
