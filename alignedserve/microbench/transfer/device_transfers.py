"""Speed of lists of blocks between a device and page-locked host memory, against a plain copy of as many bytes.

Gathered on the device, one copy over the link in pieces, and the other way round: what offload and prefetch of a worker
on a GPU do. Loads nothing that a server needs.
"""

from collections.abc import Iterator

import torch

from alignedserve.microbench.pinned_copies import OFFLOAD, PREFETCH, PinnedLists, lists_at_the_end
from alignedserve.microbench.results import TransferResult, transfer_result
from alignedserve.microbench.transfer.spec import LAYOUTS, TransferBenchmarkSpec
from alignedserve.runtime.device.streams import streams_of
from alignedserve.runtime.kv.block_storage import BlockStorage

PINNED = "pinned"


def pinned_rows(spec: TransferBenchmarkSpec, device: torch.device) -> Iterator[TransferResult]:
    """Measure both directions of every size. The plain copies are of contiguous bytes."""
    for shape, num_blocks in spec.sizes():
        layout = LAYOUTS[shape]
        storage = BlockStorage(layout, 2 * num_blocks, device)
        storage.bytes.random_()  # a link or a memory may be faster over zeros
        lists = PinnedLists(storage, streams_of(storage.device), *lists_at_the_end(storage, num_blocks))
        for name in (OFFLOAD, PREFETCH):
            speed = lists.measure(name, spec.num_rounds)
            size = (shape, layout.block_bytes, num_blocks)
            yield transfer_result(size, (PINNED, name), speed.lists_s, speed.plain_s)
