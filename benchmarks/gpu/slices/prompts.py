"""Attention of whole prompts, of chunks behind cached tokens and of many short ones, over blocks of 16 and 128 tokens,
by our kernel and by every library that is installed."""

from collections.abc import Iterator

from alignedserve.core.block_layout import BlockLayout
from alignedserve.runtime.device.dtypes import dtype_name
from alignedserve.runtime.kv.block_storage import BlockStorage
from benchmarks.kernels.attention import prefill_cases
from benchmarks.kernels.attention_batches import num_blocks_of
from benchmarks.kernels.cases import KernelCase, KernelSetup

_BLOCK_SIZES = (16, 128)
_LAYERS = 2
# Sequences, new tokens of each, context that the new tokens end.
_SIZES = ((1, 4096, 4096), (8, 512, 512), (1, 512, 4096), (1, 2048, 32768), (32, 128, 1152), (64, 16, 2064))
_TOY_SIZES = ((1, 32, 32), (2, 8, 24))


def prompt_cases(setup: KernelSetup) -> Iterator[list[KernelCase]]:
    """Yield groups to be measured by turns: every size, over blocks of each size."""
    sizes, config = _TOY_SIZES if setup.is_toy else _SIZES, setup.config
    for block_size in _BLOCK_SIZES:
        layout = BlockLayout(block_size, _LAYERS, config.num_kv_heads, config.head_dim, dtype_name(setup.dtype))
        num_blocks = max(num_blocks_of([context] * count, block_size) for count, _, context in sizes)
        storage = BlockStorage(layout, num_blocks, setup.device, has_scratch=True)
        storage.blocks.normal_()
        for size in sizes:
            yield [
                case._replace(case=f"{case.case}, blocks of {block_size}")
                for case in prefill_cases(setup, storage, *size)
            ]
