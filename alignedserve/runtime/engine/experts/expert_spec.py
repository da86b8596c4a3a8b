"""The specification of the processes that share a model's experts, and what travels between them.

A request: a header (layer, number of counts, number of rows), of each of the process's experts how many rows it has
(int64), and the rows, as they lie in memory. Its answer: as many rows.
"""

import struct

import msgspec

from alignedserve.runtime.model.sharding.tensor_shard import ExpertShare
from alignedserve.runtime.model.weight_files import ModelSpec, load_experts
from alignedserve.runtime.model.weights.feed_forward_weights import ExpertReading, LayerExperts

HEADER = struct.Struct("<IIQ")


class ExpertSpec(msgspec.Struct, frozen=True):
    """What each of the processes makes."""

    model: ModelSpec
    size: int  # processes, the worker's own included
    num_threads: int  # of each
    timeout_s: float  # for which an answer is waited for

    def share(self, index: int) -> ExpertShare:
        return ExpertShare(index, self.size)

    def num_experts(self, index: int) -> int:
        experts = self.model.config.experts
        assert experts is not None, "a model without experts"
        return len(self.share(index).experts(experts.num_experts))


class ExpertStart(msgspec.Struct, frozen=True):
    """The first frame to a process."""

    index: int
    spec: ExpertSpec


def load_share(spec: ExpertSpec, index: int) -> LayerExperts:
    """Load the experts of one process, by layer. Raises ModelError."""
    return load_experts(spec.model, ExpertReading(spec.share(index)))
