"""Requests that wait for prefix blocks out of a pool, which this worker loads where that is faster than computing.

The life of such a request:
1. On its arrival the worker has only part of its prefix cached. If computing the rest would take longer than loading
   it, behind what is being copied already, the worker asks the pool (FindPrefix). If another request already waits for
   the next block, both wait together, where that is faster too.
2. PrefixFound: the worker compares the pool's run with the request's tokens. If loading it is still worth while and
   blocks are free for it, it is copied, part by part, as other copies take their turns; other requests compute
   meanwhile.
3. Once verified, the blocks enter this worker's cache, and the lease is given back (PrefixReleased).
4. The request is admitted like a new one, and finds its prefix in the cache.
If anything fails (a lost pool, no memory, wrong checksums), the request is admitted and computes its prefix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from alignedserve.core.ids import BlockId, LeaseId, RequestId
from alignedserve.messages.caches import BlockCopy
from alignedserve.messages.events import Send
from alignedserve.messages.iterations import BlocksLoaded, Load, LoadBlocks, MapArena, OffloadBlocks, UnmapArena
from alignedserve.messages.prefixes import FindPrefix, PrefixFound, PrefixReleased
from alignedserve.messages.workers import PrefillRequest, SetPredictedLength
from alignedserve.prefix_cache.block_hashes import NamedBlock
from alignedserve.prefix_cache.cached_blocks import CachedBlock
from alignedserve.prefix_cache.contexts import PrefixCache, num_behind_state
from decode_worker.block_peers import UNREACHED_REST_S
from decode_worker.held_requests import HeldRequests

_ASKING_S = 0.001  # until the pool has answered and a copy begins
_FIRST_BYTES_PER_S = 2e9  # of a link that nothing is known of
_LEARNED_WEIGHT = 1 / 8  # of the latest load in the mean
_KNOWN_S = 600.0  # for which a load tells of those to come: a slow link is tried again, but not by every chat
_PART_S = 0.02  # of a load, until another may have its turn: a chat waits for no document's whole prefix

LoadCommand = Send | LoadBlocks
PoolCommand = LoadCommand | OffloadBlocks | MapArena | UnmapArena
TokensPerS = Callable[[], float]  # the speed at which this worker computes prompts now


class PoolOutcome(NamedTuple):
    """Commands and requests that follow from an event of a pool."""

    commands: Sequence[PoolCommand] = ()
    ready: Sequence[PrefillRequest] = ()  # to be admitted: they wait for the pool no more
    again: Sequence[PrefillRequest] = ()  # they waited for the same blocks, and may ask for more
    loaded: Sequence[CachedBlock] = ()


@dataclass(slots=True)
class _PoolLink:
    first_s: float = 0.0  # for a block, by assumption
    block_s: float = 0.0  # for a block, as learned
    known_until_s: float = float("-inf")
    rests_until_s: float = float("-inf")
    ended_s: float = float("-inf")  # when the latest load did
    is_open: bool = False

    def learn(self, block_s: float, now: float) -> None:
        weight = _LEARNED_WEIGHT if now < self.known_until_s else 1.0
        self.block_s += (block_s - self.block_s) * weight
        self.known_until_s = now + _KNOWN_S


@dataclass(slots=True, eq=False)
class _Waiting:
    message: PrefillRequest
    pool: str  # the source
    names: list[NamedBlock]  # of the full blocks to take
    num_here: int  # names of blocks cached here
    lease_id: LeaseId | None = None  # of the pool's blocks, during the load
    copy: BlockCopy | None = None  # in the pool
    block_ids: tuple[BlockId, ...] = ()  # to load into
    num_loaded: int = 0
    began_s: float = 0.0  # of the part in hand
    is_aborted: bool = False
    followers: list[PrefillRequest] = field(default_factory=list)  # that wait for the same

    @property
    def num_left(self) -> int:
        return len(self.block_ids) - self.num_loaded


class PrefixLoads:
    """The requests that wait, and the cost of the link to the pool, which is learned."""

    def __init__(self, held: HeldRequests, prefixes: PrefixCache, tokens_per_s: TokensPerS, own_pool: str) -> None:
        self._held = held
        self._prefixes = prefixes
        self._cached = prefixes.blocks
        self._block_size = prefixes.block_size
        self._state_blocks = 0 if prefixes.states is None else prefixes.states.num_blocks
        self._tokens_per_s = tokens_per_s
        self._own_pool = own_pool
        self._links: dict[str, _PoolLink] = {}  # by pool
        self._waiting: dict[RequestId, _Waiting] = {}
        self._wanted: dict[bytes, _Waiting] = {}  # by the hash of the first block that they wait for
        self.num_loaded_tokens = 0  # since it started

    def __len__(self) -> int:
        return len(self._waiting) + sum(len(waiting.followers) for waiting in self._waiting.values())

    def waiting(self) -> list[RequestId]:
        followers = [message for waiting in self._waiting.values() for message in waiting.followers]
        return [*self._waiting, *(message.request.request_id for message in followers)]

    def connected(self, pool: str, block_bytes: int) -> None:
        link = self._links.setdefault(pool, _PoolLink())
        link.first_s, link.is_open = block_bytes / _FIRST_BYTES_PER_S, True

    def disconnected(self, pool: str) -> list[PrefillRequest]:
        if pool in self._links:
            self._links[pool].is_open = False
        asking = [entry for entry in self._waiting.values() if entry.lease_id is None and entry.pool == pool]
        return [message for waiting in asking for message in (*self._end(waiting), *waiting.followers)]

    def ask(self, message: PrefillRequest, now: float) -> list[LoadCommand] | None:
        request = message.request
        is_private = not request.prefix_root or request.sampling.num_prompt_logprobs is not None
        far = message.prefix_pool
        pool = far if far is not None and self._is_open(far) else self._own_pool
        if not self._is_open(pool) or is_private or request.request_id in self._waiting:
            return None
        names = self._names_of(message)
        run = self._cached.run_of(names)
        num_here = num_behind_state(run) if self._state_blocks else len(run)
        lacking = [name.block_hash for name in names[num_here:]]
        ahead = self._wanted.get(lacking[0]) if lacking else None
        if not self._is_worth_while(len(lacking), pool if ahead is None else ahead.pool, now, behind=ahead):
            return None
        if ahead is not None:
            ahead.followers.append(message)
            return []
        waiting = _Waiting(message, pool, names, num_here)
        self._waiting[request.request_id] = self._wanted[lacking[0]] = waiting
        hashes = b"".join(lacking)
        return [Send(pool, FindPrefix(request.request_id, num_here, hashes))]

    def found(self, peer: str, message: PrefixFound, now: float) -> PoolOutcome:
        waiting, copy = self._waiting.get(message.request_id), message.copy
        released: list[LoadCommand] = [] if copy is None else [Send(peer, PrefixReleased(message.lease_id))]
        if waiting is None or waiting.lease_id is not None or waiting.pool != peer:  # of a link before
            return PoolOutcome(released)
        count = 0 if copy is None or waiting.is_aborted else self._num_to_load(waiting, copy, message.packed_tokens)
        if copy is None or not self._is_worth_while(count, peer, now):
            return PoolOutcome(released, [*self._end(waiting), *waiting.followers])  # followers would find the same
        in_all = count + self._state_blocks  # those of states come last
        waiting.lease_id, waiting.block_ids = message.lease_id, self._held.hold(in_all)
        waiting.copy = BlockCopy(copy.generation, count * self._block_size, copy.runs[:in_all], copy.num_before)
        return PoolOutcome([self._load_part(waiting, now)])

    def loaded(self, event: BlocksLoaded, now: float) -> PoolOutcome:
        (load,) = event.loads
        waiting = self._waiting[load.request_id]
        link = self._links[waiting.pool]
        is_whole = load.request_id not in event.refused
        if is_whole:
            # A simulated copier does not measure.
            seconds = event.duration_s or now - max(waiting.began_s, link.ended_s)
            link.learn(seconds / len(load.block_ids), now)
            waiting.num_loaded += len(load.block_ids)
        elif not event.is_reached and link.is_open:
            link.rests_until_s = now + UNREACHED_REST_S
        link.ended_s = now
        if is_whole and waiting.num_left and not waiting.is_aborted:
            return PoolOutcome([self._load_part(waiting, now)])
        loaded: list[CachedBlock] = []
        if waiting.num_left:
            self._held.free_held(waiting.block_ids)
        else:
            loaded = self._keep(waiting)
        assert waiting.lease_id is not None, "loaded without a lease"
        is_damaged = not is_whole and event.is_reached
        released = Send(event.source, PrefixReleased(waiting.lease_id, is_damaged=is_damaged))
        return PoolOutcome([released], self._end(waiting), waiting.followers, loaded)

    def pools_in_use(self) -> set[str]:
        return {waiting.pool for waiting in self._waiting.values()}

    def abort(self, request_id: RequestId, attempt: int | None) -> None:
        for waiting in self._waiting.values():
            if _is_up_to(waiting.message, request_id, attempt):
                waiting.is_aborted = True  # the pool's answer, or a copy, is under way
            waiting.followers = [
                follower for follower in waiting.followers if not _is_up_to(follower, request_id, attempt)
            ]

    def abort_all(self) -> None:
        for waiting in self._waiting.values():
            waiting.is_aborted = True
            waiting.followers.clear()

    def set_predicted_length(self, late: SetPredictedLength) -> None:
        for waiting in self._waiting.values():
            waiting.message = _predicted(waiting.message, late)
            waiting.followers = [_predicted(follower, late) for follower in waiting.followers]

    def _names_of(self, message: PrefillRequest) -> list[NamedBlock]:
        request, generated = message.request, message.generated_token_ids
        num_left = 2 if generated else 1
        token_ids = (request.cache_keys + generated)[: request.prompt_len + len(generated) - num_left]
        return self._prefixes.names_of(request.prefix_root, token_ids)

    def _is_open(self, pool: str) -> bool:
        return pool in self._links and self._links[pool].is_open

    def _is_worth_while(self, num_blocks: int, pool: str, now: float, *, behind: _Waiting | None = None) -> bool:
        link = self._links[pool]
        if num_blocks < 1 or now < link.rests_until_s:
            return False
        computing_s = num_blocks * self._block_size / max(self._tokens_per_s(), 1.0)
        loads = [load for load in self._waiting.values() if load.lease_id is not None and load.pool == pool]
        if behind is None:
            num_blocks_before = num_blocks + self._state_blocks
        elif behind.lease_id is None:
            num_blocks_before = len(behind.names) - behind.num_here + self._state_blocks
        else:
            num_blocks_before = behind.num_left
            loads.remove(behind)
        block_s = self._block_s(pool, now)
        # Loads take turns, part by part: a longer load copies as many blocks meanwhile, and its part in hand.
        most = num_blocks_before + self._part_len(block_s)
        beside = sum(min(load.num_left, most) for load in loads)
        if pool == self._own_pool:
            beside += self._held.num_copying()
        return _ASKING_S + (num_blocks_before + beside) * block_s < computing_s

    def _block_s(self, pool: str, now: float) -> float:
        link = self._links[pool]
        return link.block_s if now < link.known_until_s else link.first_s

    @staticmethod
    def _part_len(block_s: float) -> int:
        return max(int(_PART_S / max(block_s, 1e-9)), 1)

    def _load_part(self, waiting: _Waiting, now: float) -> LoadBlocks:
        copy, first = waiting.copy, waiting.num_loaded
        assert copy is not None, "loaded without a copy"
        num_in_all = len(waiting.block_ids)
        end = first + self._part_len(self._block_s(waiting.pool, now))
        if end >= num_in_all - self._state_blocks:
            end = num_in_all
        num_tokens = (min(end, num_in_all - self._state_blocks) - first) * self._block_size
        part = BlockCopy(copy.generation, num_tokens, copy.runs[first:end], copy.num_before + first)
        waiting.began_s = now
        load = Load(waiting.message.request.request_id, part, waiting.block_ids[first:end])
        return LoadBlocks(waiting.pool, (load,))

    def _num_to_load(self, waiting: _Waiting, copy: BlockCopy, packed_tokens: tuple[bytes, ...]) -> int:
        first, of_states = waiting.num_here, self._state_blocks
        if copy.num_before != first or not len(copy.runs) == len(packed_tokens) + of_states == copy.num_blocks:
            return 0
        count = 0
        for name, packed in zip(waiting.names[first:], packed_tokens, strict=False):
            if name.packed_tokens != packed:
                break
            count += 1
        room = self._held.state.num_free - self._held.num_promised
        if of_states:  # which stand behind all of them
            fits = count + of_states <= room and self._held.has_room_beside(count + of_states)
            return count if fits and count == len(packed_tokens) and not self._held.is_copying_out else 0
        while count > 0 and (count > room or not self._held.has_room_beside(count)):
            count = min(count // 2, max(room, 0))
        return 0 if self._held.is_copying_out else count

    def _keep(self, waiting: _Waiting) -> list[CachedBlock]:
        run = self._cached.run_of(waiting.names[: waiting.num_here])
        self._cached.acquire(run, is_use=False)
        stored: list[CachedBlock] = []
        surplus, num_tokens_in = list(waiting.block_ids), len(waiting.block_ids) - self._state_blocks
        of_tokens, state_ids = waiting.block_ids[:num_tokens_in], waiting.block_ids[num_tokens_in:]
        if len(run) == waiting.num_here:  # else what they follow has left meanwhile
            for name, block_id in zip(waiting.names[waiting.num_here :], of_tokens, strict=False):
                block = self._cached.store(run[-1] if run else None, *name, block_id)
                if block is None:  # another has its name
                    break
                if block.block_id == block_id:
                    stored.append(block)
                    surplus.remove(block_id)
                else:
                    self._cached.acquire([block], is_use=False)
                run.append(block)
        num_states = 0
        if state_ids and len(run) == waiting.num_here + len(of_tokens):
            freed = self._prefixes.keep_loaded_state(run[-1], state_ids)
            if freed is not None:
                self._held.allocator.free(freed)
                surplus, num_states = surplus[: len(surplus) - len(state_ids)], len(state_ids)
        self._cached.release(run)
        self._held.free_held(tuple(surplus))
        self._held.cache_held(len(stored) + num_states)
        self.num_loaded_tokens += len(stored) * self._block_size
        return stored

    def _end(self, waiting: _Waiting) -> list[PrefillRequest]:
        del self._waiting[waiting.message.request.request_id]
        self._wanted = {name: loading for name, loading in self._wanted.items() if loading is not waiting}
        return [] if waiting.is_aborted else [waiting.message]


def _is_up_to(message: PrefillRequest, request_id: RequestId, attempt: int | None) -> bool:
    return message.request.request_id == request_id and (attempt is None or message.attempt <= attempt)


def _predicted(message: PrefillRequest, late: SetPredictedLength) -> PrefillRequest:
    if (message.request.request_id, message.attempt) != (late.request_id, late.attempt):
        return message
    return msgspec.structs.replace(message, predicted_output_len=late.predicted_output_len)
