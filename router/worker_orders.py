"""The workers that can take a prefill now, by their wait, and the choice of one on the node of a request's gateway.

A worker's wait is the tokens that it has to compute before another prompt, fewer before a real-time one where the
policy knows classes (WorkerRecord.num_tokens_before); elastic workers tell how fast they compute prompts, and theirs is
in seconds. Example: both workers compute 5 000 tokens/s. a has 500 tokens of chat and 4 000 of documents to compute, b
has 1 500 of chat, and 1 000 that are late already. Chat waits 0.1 s at a and 0.3 s at b, and goes to a; a document
waits 0.9 s at a and 0.5 s at b, and goes to b.
Where loads are about equal, a request goes to a worker of its gateway's node: its tokens then stay on that node, and a
worker with the requests of one gateway sends one message per iteration. What this may cost is bounded by `is_as_free`.
"""

from collections.abc import Callable, Collection, Mapping

from alignedserve.core.request import Request
from router.state import PoolRecord, Ranking, WorkerRecord

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
    return near_tokens <= tokens + _MORE_TOKENS and near_requests <= (1 + _MORE_SHARE) * requests + _MORE_REQUESTS


def requests_at(worker: WorkerRecord, beside: Collection[WorkerRecord], pools: Mapping[str, PoolRecord]) -> float:
    """Return the requests of a worker of both phases; of a prefill worker, per decode worker of its pool (`beside`)."""
    if worker.registered.can_decode:
        return worker.num_held
    pool = pools.get(worker.registered.pool_name)
    num_requests = sum(other.num_held for other in beside)
    num_requests += pool.num_pooled if pool is not None else 0
    return num_requests / max(1, sum(other.registered.can_decode for other in beside))


class LongestContexts:
    """Workers by the tokens that their cache blocks hold, for prompts and for decodes."""

    def __init__(self) -> None:
        self._of_prompts: Ranking[int] = Ranking()  # tokens, negated: the longest first
        self._of_decodes: Ranking[int] = Ranking()

    def add(self, worker: WorkerRecord) -> None:
        num_tokens = worker.tokens_in(worker.registered.num_blocks)
        if worker.registered.can_prefill:
            self._of_prompts.put(worker.name, -num_tokens)
        if worker.registered.can_decode:
            self._of_decodes.put(worker.name, -num_tokens)

    def discard(self, name: str) -> None:
        self._of_prompts.discard(name)
        self._of_decodes.discard(name)

    def can_hold(self, request: Request) -> bool:
        """Return whether its prompt fits some prefilling worker, and its whole context a decoding one; none: it
        fits."""
        return _fits(request.prompt_len, self._of_prompts) and _fits(request.max_context_len, self._of_decodes)


def _fits(num_tokens: int, workers: Ranking[int]) -> bool:
    longest = workers.first()
    return longest is None or num_tokens <= -longest.rank


class Standbys:
    """The draining workers and the standbys of all nodes: `WorkerRecord.is_draining`, `is_standby`.

    Standbys are loaded and registered, and have no work until another worker is lost or drains. As many decoding
    workers have work as each tells (`num_active`), by name; a worker with requests is never put to rest.
    """

    def __init__(
        self, nodes: Mapping[str, Mapping[str, WorkerRecord]], on_change: Callable[[WorkerRecord], None]
    ) -> None:
        """`nodes`: the registered workers by the pool of their node. `on_change`: is told of each that changes."""
        self._nodes = nodes
        self._on_change = on_change
        self._draining: frozenset[str] = frozenset()  # workers and pools, registered or not; membership only

    def is_draining(self, name: str | None) -> bool:
        return name in self._draining

    def set_draining(self, names: Collection[str], workers: Mapping[str, WorkerRecord]) -> None:
        self._draining = frozenset(names)
        for worker in workers.values():
            self._note_rest(worker)
        for node in tuple(self._nodes):
            self.settle(node)

    def add(self, worker: WorkerRecord, *, is_decoding: bool) -> None:
        """Let a worker that registers have work, or none until `settle`. `is_decoding`: it has requests already."""
        worker.is_standby = worker.registered.num_active > 0 and worker.registered.can_decode and not is_decoding
        worker.is_draining = self._rests(worker)

    def settle(self, node: str) -> None:
        able = [member for _, member in sorted(self._nodes.get(node, {}).items()) if member.registered.can_decode]
        able = [member for member in able if member.registered.num_active and member.name not in self._draining]
        if not able:
            return
        num_missing = able[0].registered.num_active - sum(not member.is_standby for member in able)
        for member in [member for member in able if member.is_standby][: max(num_missing, 0)]:
            self._change(member, is_standby=False)
        idle = [
            member
            for member in reversed(able)
            if not member.is_standby and not member.prefilling and not member.decoding
        ]
        for member in idle[: max(-num_missing, 0)]:
            self._change(member, is_standby=True)

    def _change(self, worker: WorkerRecord, *, is_standby: bool) -> None:
        worker.is_standby = is_standby
        self._note_rest(worker)

    def _note_rest(self, worker: WorkerRecord) -> None:
        rests = self._rests(worker)
        if worker.is_draining != rests:
            worker.is_draining = rests
            self._on_change(worker)

    def _rests(self, worker: WorkerRecord) -> bool:
        return worker.is_standby or worker.name in self._draining
