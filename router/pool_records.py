"""The router's records of pools, and of the requests that wait in them."""

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from alignedserve.core.ids import RequestId
from alignedserve.messages.cluster_view import LengthTree
from router.ranking import Ranking


class PooledRecord(NamedTuple):
    """A request that waits in a pool."""

    num_blocks: int
    since_s: float
    is_real_time: bool = False
    late_at_s: float = math.inf  # when the next token of a chat is late


@dataclass(slots=True)
class PoolRecord:
    """One registered pool."""

    name: str
    epoch: int  # counts registrations: a restarted pool has another one
    num_blocks: int
    layout_digest: str = ""
    num_blocks_used: int = 0
    num_blocks_kept: int = 0
    num_reserved: int = 0  # requests that wait for free blocks there, after their prefill
    lengths: LengthTree = field(default_factory=LengthTree)  # of those that wait for a batch
    large_requests: dict[RequestId, tuple[int, float]] = field(
        default_factory=dict
    )  # pooled requests larger than a busy worker's share: blocks, since when
    pooled: OrderedDict[RequestId, PooledRecord] = field(
        default_factory=OrderedDict
    )  # requests that wait there for a batch or are on their way, as the router knows them; the oldest first
    pooled_real_time: dict[RequestId, int] = field(default_factory=dict)  # the real-time ones of these: blocks
    late: Ranking[float] = field(default_factory=Ranking)  # those by when their next token is late

    def add_pooled(self, request_id: RequestId, record: PooledRecord) -> None:
        self.pooled[request_id] = record
        if record.is_real_time:
            self.pooled_real_time[request_id] = record.num_blocks
        if math.isfinite(record.late_at_s):
            self.late.put(request_id, record.late_at_s)

    def remove_pooled(self, request_id: RequestId) -> bool:
        self.pooled_real_time.pop(request_id, None)
        self.late.discard(request_id)
        self.large_requests.pop(request_id, None)
        return self.pooled.pop(request_id, None) is not None

    @property
    def num_pooled(self) -> int:
        return len(self.pooled)

    @property
    def oldest_s(self) -> float:
        return next(iter(self.pooled.values())).since_s

    @property
    def late_at_s(self) -> float:
        """When the next token of one of its chats is late first; infinite: none has an objective."""
        first = self.late.first()
        return first.rank if first is not None else math.inf

    @property
    def oldest_blocks(self) -> int:
        return next(iter(self.pooled.values())).num_blocks
