"""A worker's part in the prefix blocks that pools keep: it offers its blocks to its node's pool, and loads missing
ones.

Where the router knows of another node's pool with clearly more, it names that pool with the request: the worker
links with it on demand, and asks it instead.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from alignedserve.core.ids import RequestId
from alignedserve.messages.caches import ArenaOffered
from alignedserve.messages.events import CommonEvent, Dial, HangUp, PeerConnected, PeerDisconnected, Received, Send
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    BufferOpened,
    IterationCompleted,
    MapArena,
    OffloadBlocks,
    UnmapArena,
)
from alignedserve.messages.prefixes import (
    PrefixBlock,
    PrefixBlocksReserved,
    PrefixBlocksWritten,
    PrefixFound,
    PrefixPart,
    ReservedPart,
    StorePrefixBlocks,
)
from alignedserve.messages.workers import PrefillRequest
from alignedserve.prefix_cache.cached_blocks import CachedBlock, CachedBlocks, context_of, state_names
from alignedserve.prefix_cache.contexts import PrefixCache
from decode_worker.block_peers import BlockPeers
from decode_worker.colocated.prefix_loads import PoolCommand, PoolOutcome, PrefixLoads, TokensPerS
from decode_worker.held_requests import HeldRequests

_OFFERED_BYTES = 64 << 20  # in one offer: loads of blocks wait for its copies
_REST = 4.0  # times the duration of the last copies, until the next offer
_SPACING_S = 0.25  # of offers that take all there is
_SMALL_SPACING_S = 1.0  # before one of fewer blocks than this: decoding requests fill one in most iterations
_MANY_BLOCKS = 64
_REFUSED_REST_S = 1.0  # where the pool has no room
_NO_REQUEST = RequestId("")  # blocks of a prefix belong to none

OfferCommand = Send | OffloadBlocks
PoolEvent = CommonEvent | IterationCompleted | BufferOpened | BlocksOffloaded | BlocksLoaded


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

    def offer(self, now: float) -> list[OfferCommand]:
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

    def reserved(self, message: PrefixBlocksReserved, now: float) -> list[OfferCommand]:
        if len(message.parts) != len(self._offered):
            return []  # no answer to what was offered
        offered, self._offered = self._offered, []
        self._began_s = now
        pairs = zip(offered, message.parts, strict=True)
        return [command for offer, part in pairs for command in self._write(offer, part, now)]

    def offloaded(self, event: BlocksOffloaded, now: float) -> list[OfferCommand]:
        command = event.command
        assert command.lease_id is not None, "copied without a lease"
        offer = self._writing.pop(int(command.lease_id))
        if not self._writing:
            self._rests_until_s = max(self._rests_until_s, now + _REST * (now - self._began_s))
        whole = len(self._still_cached(offer.blocks)) if event.runs is not None else 0
        checksums = tuple(run.checksum for run in (event.runs or ())[:whole])
        self.num_stored += len(checksums)
        return [Send(command.target, PrefixBlocksWritten(command.lease_id, checksums))]

    def _write(self, offer: _Offer, part: ReservedPart, now: float) -> list[OfferCommand]:
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


class PooledPrefixes:
    """Offers and loads, and the events that are about them."""

    def __init__(self, held: HeldRequests, prefixes: PrefixCache, pool: str, *, tokens_per_s: TokensPerS) -> None:
        self._pool = pool
        self._pools: dict[str, None] = {}  # that were ever linked: copies may end later
        self._peers = BlockPeers(pool)
        state_blocks = 0 if prefixes.states is None else prefixes.states.num_blocks
        self._offers = PrefixOffers(prefixes.blocks, state_blocks=state_blocks)
        prefixes.blocks.observers.append(self._offers)
        self.loads = PrefixLoads(held, prefixes, tokens_per_s, pool)

    def takes(self, event: PoolEvent) -> bool:
        match event:
            case PeerConnected(role, _) | PeerDisconnected(role, _):
                return role is Role.KV_POOL
            case Received(peer, _):
                return peer in self._pools
            case BlocksLoaded():
                return event.source in self._pools
            case BlocksOffloaded():
                return event.command.target == self._pool
        return False

    def offer(self, now: float) -> list[PoolCommand]:
        """Offer what the worker has cached since; to be called after every event."""
        return [*self._offers.offer(now)]

    def link(self, message: PrefillRequest, now: float) -> list[Dial]:
        return [] if message.prefix_pool is None else self._peers.needed(message.prefix_pool, now)

    def hang_up_unused(self, now: float) -> list[HangUp]:
        return self._peers.hang_up_unused(now, self.loads.pools_in_use)

    def on_event(self, event: PoolEvent, now: float) -> PoolOutcome:
        match event:
            case PeerConnected(_, peer):
                self._pools[peer] = None
            case Received(peer, ArenaOffered() as offered):
                if peer == self._pool:
                    self._offers.connected(peer, offered.block_bytes)
                self.loads.connected(peer, offered.block_bytes)
                return PoolOutcome([MapArena(peer, offered)])
            case PeerDisconnected(_, peer):
                if peer == self._pool:
                    self._offers.disconnected()
                return PoolOutcome([UnmapArena(peer)], self.loads.disconnected(peer))
            case Received(_, PrefixBlocksReserved() as reserved):
                return PoolOutcome(self._offers.reserved(reserved, now))
            case Received(peer, PrefixFound() as answer):
                return self.loads.found(peer, answer, now)
            case BlocksOffloaded():
                return PoolOutcome(self._offers.offloaded(event, now))
            case BlocksLoaded():
                outcome = self.loads.loaded(event, now)
                self._offers.skip(outcome.loaded)
                return outcome
            case Received(_, message):
                raise AssertionError(f"a pool sends no {type(message).__name__} to such a worker")
        return PoolOutcome()
