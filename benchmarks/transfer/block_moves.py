"""The blocks that a benchmark moves: in random order on both sides, by any KVTransfer, against a plain copy."""

import random
from collections.abc import Callable

from alignedserve.core.errors import HandoffRejected
from alignedserve.core.ids import BlockId
from alignedserve.messages.caches import BlockCopy
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, KVTransfer, OffloadRequest
from benchmarks.measuring.results import TransferResult, transfer_result
from benchmarks.measuring.turns import medians_by_turns
from benchmarks.transfer.spec import BLOCK_SIZE, LAYOUTS, TransferBenchmarkSpec

GENERATION = 1


class BlockMoves:
    """One size of one shape."""

    def __init__(self, spec: TransferBenchmarkSpec, shape: str, num_blocks: int) -> None:
        self.layout = LAYOUTS[shape]
        self.num_blocks = num_blocks
        self.mine, self.theirs = ([BlockId(i) for i in range(num_blocks)] for _ in range(2))
        order = random.Random(spec.seed)
        order.shuffle(self.mine)
        order.shuffle(self.theirs)
        self._shape = shape
        self._num_rounds = spec.num_rounds

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes

    def offload(self, transfer: KVTransfer) -> BlockCopy:
        (runs,) = transfer.offload([OffloadRequest(self.mine, self.theirs, GENERATION)])
        if runs is None:
            raise HandoffRejected("an offload that must hold was refused; the log says why")
        return BlockCopy(GENERATION, self.num_blocks * BLOCK_SIZE, runs)

    def fetch(self, transfer: KVTransfer, copy: BlockCopy) -> None:
        if transfer.fetch([FetchRequest(copy, self.mine)]) != [True]:
            raise HandoffRejected("a copy that was just written does not hold; the log says why")

    def result(
        self, transport: str, operation: str, measured: Callable[[], object], plain: Callable[[], object]
    ) -> TransferResult:
        size = (self._shape, self.layout.block_bytes, self.num_blocks)
        return transfer_result(size, (transport, operation), *medians_by_turns(self._num_rounds, measured, plain))
