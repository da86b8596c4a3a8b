"""A worker's part in the prefix blocks that pools keep: it offers its blocks to its pool, and loads missing ones.

Where the router knows of another node's pool with clearly more, it names that pool with the request: the worker
links with it on demand, and asks it instead.

The life of a request that waits for prefix blocks, where loading is faster than computing:
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

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

from typing_extensions import override

from alignedserve.core.ids import BlockId, LeaseId, RequestId
from alignedserve.messages.caches import ArenaOffered, BlockCopy
from alignedserve.messages.events import PeerConnected, PeerDisconnected, Received, Send
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    Load,
    LoadBlocks,
    MapArena,
    OffloadBlocks,
    UnmapArena,
)
from alignedserve.messages.prefixes import (
    FindPrefix,
    PrefixBlock,
    PrefixBlocksReserved,
    PrefixBlocksWritten,
    PrefixFound,
    PrefixPart,
    PrefixReleased,
    ReservedPart,
    StorePrefixBlocks,
)
from alignedserve.messages.workers import PrefillRequest, SetPredictedLength
from alignedserve.prefix_cache.block_hashes import NamedBlock
from alignedserve.prefix_cache.cached_blocks import CachedBlock, CachedBlocks, context_of, state_names
from alignedserve.prefix_cache.contexts import PrefixCache, num_behind_state
from alignedserve.worker_core.block_peers import UNREACHED_REST_S, BlockPeers
from alignedserve.worker_core.held_requests import HeldRequests
from alignedserve.worker_core.part import Commands, WorkerCommand, WorkerEvent, WorkerPart
from alignedserve.worker_core.request import with_prediction

_OFFERED_BYTES = 64 << 20  # in one offer: loads of blocks wait for its copies
_REST = 4.0  # times the duration of the last copies, until the next offer
_SPACING_S = 0.25  # of offers that take all there is
_SMALL_SPACING_S = 1.0  # before one of fewer blocks than this: decoding requests fill one in most iterations
_MANY_BLOCKS = 64
_REFUSED_REST_S = 1.0  # where the pool has no room
_NO_REQUEST = RequestId("")  # blocks of a prefix belong to none

_ASKING_S = 0.001  # until the pool has answered and a copy begins
_FIRST_BYTES_PER_S = 2e9  # of a link that nothing is known of
_LEARNED_WEIGHT = 1 / 8  # of the latest load in the mean
_KNOWN_S = 600.0  # for which a load tells of those to come: a slow link is tried again, but not by every chat
_PART_S = 0.02  # of a load, until another may have its turn: a chat waits for no document's whole prefix

TokensPerS = Callable[[], float]  # the speed at which this worker computes prompts now


@dataclass(slots=True, eq=False)
class _Offer:
    blocks: list[CachedBlock]

    @property
    def num_before(self) -> int:
        return self.blocks[0].depth


class PrefixOffers:
    """The blocks that the pool may lack, the offer under way, and the copies that follow from it.

    The worker offers all blocks that have entered its cache since the last offer, in one message. The pool answers with
    places for the blocks that it lacks and keeps. These are copied and reported with their checksums. One offer is
    under way at a time: a slow pool gets fewer and larger ones. After its copies comes a rest several times as long, so
    that copies take a small part of one core at most. Offers are a quarter of a second apart, or a second if little is
    new, as a message costs as much as the copy of a block.

    Nothing is held for a copy, as policies count on free blocks. A block that left the cache before its copy was done
    may have been overwritten meanwhile: neither it nor the blocks after it are reported.
    """

    def __init__(self, cached: CachedBlocks, *, state_blocks: int = 0) -> None:
        """`state_blocks`: of contexts whose states have blocks of their own, which a pool keeps like blocks that
        follow."""
        self._cached = cached
        self._state_blocks = state_blocks
        self._of_states: dict[CachedBlock, list[CachedBlock]] = {}  # as such blocks, by the one before them
        if state_blocks:
            cached.states.observers.append(self.state_changed)
        self._pool: str | None = None
        self._max_offered = 1
        self._new: dict[CachedBlock, None] = {}  # not offered yet, each after the one before it in its context
        self._offered: list[_Offer] = []  # awaiting the pool's answer
        self._writing: dict[int, _Offer] = {}  # by lease
        self._began_s = self._rests_until_s = 0.0
        self._gathers_until_s = 0.0  # unless many blocks are new
        self.num_stored = 0  # blocks written, since it started

    # --- the worker's cache

    def stored(self, block: CachedBlock) -> None:
        if self._pool is not None and not self._state_blocks:
            self._new[block] = None

    def removed(self, block: CachedBlock) -> None:
        self._new.pop(block, None)

    def state_changed(self, block: CachedBlock) -> None:
        for of_state in self._of_states.pop(block, ()):
            self._new.pop(of_state, None)
        if block.state_ids:
            self._of_states[block] = _as_blocks(block)
            if self._pool is not None:
                self._new |= dict.fromkeys(self._up_to_states(block))

    def skip(self, blocks: Iterable[CachedBlock]) -> None:
        for block in blocks:
            for offered in (block, *self._of_states.get(block, ())):
                self._new.pop(offered, None)

    def connected(self, pool: str, block_bytes: int) -> None:
        self._pool = pool
        self._max_offered = max(_OFFERED_BYTES // block_bytes, 1)
        if self._state_blocks:
            self._new = dict.fromkeys(
                up_to_state for block in self._of_states for up_to_state in self._up_to_states(block)
            )
        else:
            self._new = dict.fromkeys(sorted(self._cached, key=lambda block: block.depth))
        self._rests_until_s = self._gathers_until_s = 0.0

    def disconnected(self) -> None:
        self._pool = None
        self._new.clear()
        self._offered.clear()

    def offer(self, now: float) -> Commands:
        if not self._new or self._pool is None or self._offered or self._writing or now < self._rests_until_s:
            return []
        if now < self._gathers_until_s and len(self._new) < _MANY_BLOCKS:
            return []
        taken = [block for block, _ in zip(self._new, range(self._max_offered), strict=False)]
        for block in taken:
            del self._new[block]
        if not self._new:
            self._rests_until_s = now + _SPACING_S
            self._gathers_until_s = now + _SMALL_SPACING_S
        self._offered = [_Offer(part) for part in _in_parts(taken)]
        return [Send(self._pool, StorePrefixBlocks(tuple(_part_of(offer) for offer in self._offered)))]

    def reserved(self, message: PrefixBlocksReserved, now: float) -> Commands:
        if len(message.parts) != len(self._offered):
            return []  # no answer to what was offered
        offered, self._offered = self._offered, []
        self._began_s = now
        pairs = zip(offered, message.parts, strict=True)
        return [command for offer, part in pairs for command in self._write(offer, part, now)]

    def offloaded(self, event: BlocksOffloaded, now: float) -> Commands:
        command = event.command
        assert command.lease_id is not None, "copied without a lease"
        offer = self._writing.pop(int(command.lease_id))
        if not self._writing:
            self._rests_until_s = max(self._rests_until_s, now + _REST * (now - self._began_s))
        whole = len(self._still_cached(offer.blocks)) if event.runs is not None else 0
        checksums = tuple(run.checksum for run in (event.runs or ())[:whole])
        self.num_stored += len(checksums)
        return [Send(command.target, PrefixBlocksWritten(command.lease_id, checksums))]

    def _write(self, offer: _Offer, part: ReservedPart, now: float) -> Commands:
        assert self._pool is not None, "answered by no pool"
        if part.is_orphan and offer.num_before:  # the pool has let the blocks before them go: all are offered again
            self._new = dict.fromkeys(self._context_of(offer)) | self._new
            return []
        written = self._still_cached(offer.blocks[part.num_known :][: len(part.block_ids)])
        rest = self._still_cached(offer.blocks)[part.num_known + len(part.block_ids) :]
        if rest:
            self._new |= dict.fromkeys(rest)
            self._rests_until_s = now + _REFUSED_REST_S
        if not part.block_ids:
            return []
        lease_id = part.lease_id
        if not written:
            return [Send(self._pool, PrefixBlocksWritten(lease_id, ()))]
        self._writing[int(lease_id)] = _Offer(written)
        source = tuple(block.block_id for block in written)
        target, num_before = part.block_ids[: len(written)], written[0].depth
        return [OffloadBlocks(_NO_REQUEST, 0, source, self._pool, target, lease_id, lease_id, num_before)]

    def _context_of(self, offer: _Offer) -> list[CachedBlock]:
        here = self._still_cached(offer.blocks)
        return context_of(here[-1]) if here else []

    def _still_cached(self, blocks: list[CachedBlock]) -> list[CachedBlock]:
        return list(takewhile(self._is_cached, blocks))

    def _is_cached(self, block: CachedBlock) -> bool:
        if self._cached.get(block.block_hash) is block:
            return True
        edge = _edge_of(block)
        return edge is not None and block in self._of_states.get(edge, ())

    def _up_to_states(self, edge: CachedBlock) -> list[CachedBlock]:
        return [*context_of(edge), *self._of_states[edge]]


def _as_blocks(edge: CachedBlock) -> list[CachedBlock]:
    blocks, parent = list[CachedBlock](), edge
    for name, block_id in zip(state_names(edge.block_hash, len(edge.state_ids)), edge.state_ids, strict=True):
        parent = CachedBlock(name.block_hash, parent, name.packed_tokens, block_id, parent.depth + 1)
        blocks.append(parent)
    return blocks


def _edge_of(of_state: CachedBlock) -> CachedBlock | None:
    edge: CachedBlock | None = of_state
    while edge is not None and len(edge.packed_tokens) == 1:
        edge = edge.parent
    return edge


def _in_parts(blocks: list[CachedBlock]) -> Iterator[list[CachedBlock]]:
    parts: dict[CachedBlock, list[CachedBlock]] = {}  # by their last block
    for block in blocks:
        part = parts.pop(block.parent, []) if block.parent is not None else []
        part.append(block)
        parts[block] = part
    yield from parts.values()


def _part_of(offer: _Offer) -> PrefixPart:
    blocks = offer.blocks
    parent = blocks[0].parent
    named = tuple(PrefixBlock(block.block_hash, block.packed_tokens) for block in blocks)
    # Of a context's first block the parent is its root, which the pool need not know.
    return PrefixPart(offer.num_before, parent.block_hash if parent is not None else named[0].block_hash, named)


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


class Admit(Protocol):
    """Takes a request up again that has waited; unless `is_new`, without another question to a pool."""

    def __call__(self, message: PrefillRequest, now: float, *, is_new: bool) -> Commands: ...


class PooledPrefixes(WorkerPart):
    """Offers, the requests that wait for blocks, and the cost of the links to pools, which is learned."""

    def __init__(
        self, held: HeldRequests, prefixes: PrefixCache, pool: str, *, tokens_per_s: TokensPerS, admit: Admit
    ) -> None:
        self._held = held
        self._prefixes = prefixes
        self._cached = prefixes.blocks
        self._block_size = prefixes.block_size
        self._state_blocks = 0 if prefixes.states is None else prefixes.states.num_blocks
        self._tokens_per_s = tokens_per_s
        self._admit = admit
        self._own_pool = pool
        self._peers = BlockPeers(pool)
        self._offers = PrefixOffers(prefixes.blocks, state_blocks=self._state_blocks)
        prefixes.blocks.observers.append(self._offers)
        self._links: dict[str, _PoolLink] = {}  # by pool that was ever linked: copies may end later
        self._waiting: dict[RequestId, _Waiting] = {}
        self._wanted: dict[bytes, _Waiting] = {}  # by the hash of the first block that they wait for
        self.num_loaded_tokens = 0  # since it started

    @override
    def takes(self, event: WorkerEvent) -> bool:
        match event:
            case PeerConnected(role, _) | PeerDisconnected(role, _):
                return role is Role.KV_POOL
            case Received(peer, _):
                return peer in self._links
            case BlocksLoaded():
                return event.source in self._links
            case BlocksOffloaded():
                return event.command.target == self._own_pool
        return False

    @override
    def on_event(self, event: WorkerEvent, now: float) -> Commands:
        match event:
            case PeerConnected(_, peer):
                self._links.setdefault(peer, _PoolLink())
                return ()
            case Received(peer, ArenaOffered() as offered):
                if peer == self._own_pool:
                    self._offers.connected(peer, offered.block_bytes)
                link = self._links.setdefault(peer, _PoolLink())
                link.first_s, link.is_open = offered.block_bytes / _FIRST_BYTES_PER_S, True
                return [MapArena(peer, offered)]
            case PeerDisconnected(_, peer):
                return [UnmapArena(peer), *self._disconnected(peer, now)]
            case Received(_, PrefixBlocksReserved() as reserved):
                return self._offers.reserved(reserved, now)
            case Received(peer, PrefixFound() as answer):
                return self._found(peer, answer, now)
            case BlocksOffloaded():
                return self._offers.offloaded(event, now)
            case BlocksLoaded():
                return self._loaded(event, now)
        assert isinstance(event, Received), "an event of others"
        raise AssertionError(f"a pool sends no {type(event.message).__name__} to such a worker")

    @override
    def tick(self, now: float) -> Commands:
        pools_in_use = {waiting.pool for waiting in self._waiting.values()}
        return self._peers.hang_up_unused(now, lambda: pools_in_use)

    def offer(self, now: float) -> Commands:
        """Offer what the worker has cached since; to be called after every event."""
        return self._offers.offer(now)

    def _admitted(self, ready: Iterable[PrefillRequest], now: float, *, is_new: bool = False) -> list[WorkerCommand]:
        return [command for message in ready for command in self._admit(message, now, is_new=is_new)]

    def __len__(self) -> int:
        return len(self._waiting) + sum(len(waiting.followers) for waiting in self._waiting.values())

    def waiting(self) -> list[RequestId]:
        followers = [message for waiting in self._waiting.values() for message in waiting.followers]
        return [*self._waiting, *(message.request.request_id for message in followers)]

    def _disconnected(self, pool: str, now: float) -> Commands:
        if pool == self._own_pool:
            self._offers.disconnected()
        if pool in self._links:
            self._links[pool].is_open = False
        asking = [entry for entry in self._waiting.values() if entry.lease_id is None and entry.pool == pool]
        return self._admitted([message for waiting in asking for message in self._all_of(waiting)], now)

    def ask(self, message: PrefillRequest, now: float) -> tuple[Commands, bool]:
        """Ask for what a request's prefix lacks here; return whether the request waits for it."""
        linked = [] if message.prefix_pool is None else self._peers.needed(message.prefix_pool, now)
        question = self._question(message, now)
        return [*linked, *(question or ())], question is not None

    def _question(self, message: PrefillRequest, now: float) -> Commands | None:
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
            return ()
        waiting = _Waiting(message, pool, names, num_here)
        self._waiting[request.request_id] = self._wanted[lacking[0]] = waiting
        hashes = b"".join(lacking)
        return [Send(pool, FindPrefix(request.request_id, num_here, hashes))]

    def _found(self, peer: str, message: PrefixFound, now: float) -> Commands:
        waiting, copy = self._waiting.get(message.request_id), message.copy
        released: list[WorkerCommand] = [] if copy is None else [Send(peer, PrefixReleased(message.lease_id))]
        if waiting is None or waiting.lease_id is not None or waiting.pool != peer:  # of a link before
            return released
        count = 0 if copy is None or waiting.is_aborted else self._num_to_load(waiting, copy, message.packed_tokens)
        if copy is None or not self._is_worth_while(count, peer, now):
            return [*released, *self._admitted(self._all_of(waiting), now)]  # followers would find the same
        in_all = count + self._state_blocks  # those of states come last
        waiting.lease_id, waiting.block_ids = message.lease_id, self._held.hold(in_all)
        waiting.copy = BlockCopy(copy.generation, count * self._block_size, copy.runs[:in_all], copy.num_before)
        return [self._load_part(waiting, now)]

    def _loaded(self, event: BlocksLoaded, now: float) -> Commands:
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
            return [self._load_part(waiting, now)]
        if waiting.num_left:
            self._held.free_held(waiting.block_ids)
        else:
            self._offers.skip(self._keep(waiting))
        assert waiting.lease_id is not None, "loaded without a lease"
        is_damaged = not is_whole and event.is_reached
        released = Send(event.source, PrefixReleased(waiting.lease_id, is_damaged=is_damaged))
        ready = self._admitted(self._end(waiting), now)
        # Those that waited for the same blocks may ask for more.
        return [released, *ready, *self._admitted(waiting.followers, now, is_new=True)]

    def _all_of(self, waiting: _Waiting) -> list[PrefillRequest]:
        return [*self._end(waiting), *waiting.followers]

    @override
    def abort(self, request_id: RequestId, attempt: int | None) -> Commands:
        for waiting in self._waiting.values():
            if _is_up_to(waiting.message, request_id, attempt):
                waiting.is_aborted = True  # the pool's answer, or a copy, is under way
            waiting.followers = [
                follower for follower in waiting.followers if not _is_up_to(follower, request_id, attempt)
            ]
        return ()

    @override
    def abort_all(self, now: float) -> Commands:
        for waiting in self._waiting.values():
            waiting.is_aborted = True
            waiting.followers.clear()
        return ()

    def set_predicted_length(self, late: SetPredictedLength) -> None:
        for waiting in self._waiting.values():
            waiting.message = with_prediction(waiting.message, late)
            waiting.followers = [with_prediction(follower, late) for follower in waiting.followers]

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
