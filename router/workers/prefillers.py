"""The workers that can take a prefill now, by their wait, and the choice of one on the node of a request's gateway.

A worker's wait is the tokens that it has to compute before another prompt, fewer before a real-time one where the
policy knows classes (WorkerRecord.num_tokens_before); elastic workers tell how fast they compute prompts, and theirs is
in seconds. Example: both workers compute 5 000 tokens/s. a has 500 tokens of chat and 4 000 of documents to compute, b
has 1 500 of chat, and 1 000 that are late already. Chat waits 0.1 s at a and 0.3 s at b, and goes to a; a document
waits 0.9 s at a and 0.5 s at b, and goes to b.
Where loads are about equal, a request goes to a worker of its gateway's node: its tokens then stay on that node, and a
worker with the requests of one gateway sends one message per iteration. What this may cost is bounded by `is_as_free`.
"""

from collections.abc import Collection, Mapping

from router.pool_records import PoolRecord
from router.ranking import Ranking
from router.state import WorkerRecord

_MORE_TOKENS = 256  # to prefill before its own: less than an iteration of most devices
_MORE_REQUESTS = 1.0
_MORE_SHARE = 0.125  # of requests: an iteration of that many more takes no longer than that many times as long


class Prefillers:
    """Workers that can take a prefill now: the one with the least wait of the cluster, and of each node.

    Ties: the fewest decoding requests (workers that do both phases), then the name. For prompts that go before
    documents the fewest chats come first, as the prompt prolongs their gaps; of separate prefill workers the fewest
    tokens of any class, as it waits for the end of the iteration in flight.
    """

    def __init__(self, *, is_real_time: bool = False) -> None:
        """`is_real_time`: by the wait of real-time prompts, which go before others."""
        self._is_real_time = is_real_time
        self._all: Ranking[tuple[float, int, int]] = Ranking()
        self._by_node: dict[str, Ranking[tuple[float, int, int]]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def put(self, worker: WorkerRecord) -> None:
        rank = (worker.wait_s(is_real_time=self._is_real_time), self._num_beside(worker), len(worker.decoding))
        self._all.put(worker.name, rank)
        if worker.registered.node:
            self._by_node.setdefault(worker.registered.node, Ranking()).put(worker.name, rank)

    def _num_beside(self, worker: WorkerRecord) -> int:
        if not self._is_real_time:
            return 0
        return len(worker.decoding_real_time) if worker.registered.can_decode else worker.num_prefill_tokens

    def discard(self, worker: WorkerRecord) -> None:
        self._all.discard(worker.name)
        node = worker.registered.node
        if node in self._by_node:
            self._by_node[node].discard(worker.name)
            if not len(self._by_node[node]):
                del self._by_node[node]

    def least_loaded(self) -> str | None:
        first = self._all.first()
        return first.name if first is not None else None

    def least_loaded_of(self, node: str) -> str | None:
        first = self._by_node[node].first() if node in self._by_node else None
        return first.name if first is not None else None


def is_as_free(near_tokens: int, near_requests: float, tokens: int, requests: float) -> bool:
    """Return whether a worker near the gateway is about as free as the least loaded one.

    It has at most 256 tokens more to prefill, and at most an eighth more requests, and one.
    """
    return near_tokens <= tokens + _MORE_TOKENS and near_requests <= (1 + _MORE_SHARE) * requests + _MORE_REQUESTS


def requests_at(worker: WorkerRecord, beside: Collection[WorkerRecord], pools: Mapping[str, PoolRecord]) -> float:
    """Return how many requests a worker has that does both phases; of a prefill worker, those for each decode worker
    beside it, which will get what it prefills. `beside`: the workers of its pool.
    """
    if worker.registered.can_decode:
        return len(worker.prefilling) + len(worker.decoding)
    pool = pools.get(worker.registered.pool_name)
    num_requests = sum(len(one.prefilling) + len(one.decoding) for one in beside)
    num_requests += pool.num_pooled if pool is not None else 0
    return num_requests / max(1, sum(one.registered.can_decode for one in beside))
