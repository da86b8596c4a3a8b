"""The two kinds of decode attention, which a batch of mixed lengths costs differently."""

import enum

from alignedserve.costmodel.work import IterationWork


class AttentionKernel(enum.Enum):
    """Ways to spread the work of decode attention over a device."""

    LOAD_BALANCED = "load_balanced"  # contexts are split into even parts: time follows their sum
    ONE_BLOCK_PER_SEQUENCE = "one_block_per_sequence"  # the longest is the straggler: time follows number * maximum

    def num_charged_keys(self, work: IterationWork) -> int:
        """Count the keys that the decodes are charged for."""
        if self is AttentionKernel.LOAD_BALANCED:
            return work.decode_context_len
        return work.num_decodes * work.max_decode_context_len
