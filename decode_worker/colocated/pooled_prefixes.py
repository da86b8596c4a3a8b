"""A worker's part in the prefix blocks that pools keep: it offers its own to that of its node, and loads what it lacks.

Where the router knows of another node's pool that has clearly more, it names that with the request: the worker links
with it on demand, and asks it in place of its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

from alignedserve.core.ids import RequestId
from alignedserve.messages.caches import ArenaOffered
from alignedserve.messages.events import CommonEvent, Dial, HangUp, PeerConnected, PeerDisconnected, Received
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    BufferOpened,
    IterationCompleted,
    MapArena,
    UnmapArena,
)
from alignedserve.messages.prefixes import PrefixBlocksReserved, PrefixFound
from alignedserve.messages.workers import PrefillRequest, SetPredictedLength
from alignedserve.prefix_cache.contexts import PrefixCache
from decode_worker.block_peers import BlockPeers
from decode_worker.colocated.prefix_loads import LoadCommand, PrefixLoads, TokensPerS
from decode_worker.colocated.prefix_offers import OfferCommand, PrefixOffers
from decode_worker.held_requests import HeldRequests

PoolEvent = CommonEvent | IterationCompleted | BufferOpened | BlocksOffloaded | BlocksLoaded
PoolCommand = OfferCommand | LoadCommand | MapArena | UnmapArena


class PoolOutcome(NamedTuple):
    """Commands and requests that follow from an event."""

    commands: Sequence[PoolCommand] = ()
    ready: Sequence[PrefillRequest] = ()  # requests to be admitted: they wait for the pool no more
    again: Sequence[PrefillRequest] = ()  # those that may ask it again, as if they came now


class PooledPrefixes:
    """Offers and loads, and the events that are about them."""

    def __init__(self, held: HeldRequests, prefixes: PrefixCache, pool: str, *, tokens_per_s: TokensPerS) -> None:
        self._pool = pool
        self._pools: dict[str, None] = {}  # that were ever linked: copies may end later
        self._peers = BlockPeers(pool)
        self._offers = PrefixOffers(prefixes.blocks)
        prefixes.blocks.observers.append(self._offers)
        self._loads = PrefixLoads(held, prefixes, tokens_per_s, pool)

    def __len__(self) -> int:
        """Return how many requests wait for the pool."""
        return len(self._loads)

    def waiting(self) -> list[RequestId]:
        """Return the requests that wait for the pool."""
        return self._loads.waiting()

    @property
    def num_loaded_tokens(self) -> int:
        """Tokens whose cache came from the pool, since the worker started."""
        return self._loads.num_loaded_tokens

    def takes(self, event: PoolEvent) -> bool:
        """Return whether an event comes from a pool, or from a copy to or from one."""
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
        """Dial the pool of another node that the router names; requests ask it once the link is there."""
        return [] if message.prefix_pool is None else self._peers.needed(message.prefix_pool, now)

    def hang_up_unused(self, now: float) -> list[HangUp]:
        """Hang up on pools of other nodes that had no use for long."""
        return self._peers.hang_up_unused(now, self._loads.pools_in_use)

    def ask(self, message: PrefillRequest) -> list[PoolCommand] | None:
        """Ask the pool for a request's prefix; None: admit the request now."""
        asked = self._loads.ask(message)
        return None if asked is None else [*asked]

    def abort(self, request_id: RequestId, attempt: int | None) -> None:
        """Abort a request that waits; with an attempt, only that one and earlier ones."""
        self._loads.abort(request_id, attempt)

    def abort_all(self) -> None:
        """Abort every request that waits."""
        self._loads.abort_all()

    def set_predicted_length(self, message: SetPredictedLength) -> None:
        """Set a later prediction for a request that waits."""
        self._loads.set_predicted_length(message)

    def on_event(self, event: PoolEvent, now: float) -> PoolOutcome:
        """Return what follows from an event that it takes."""
        match event:
            case PeerConnected(_, peer):
                self._pools[peer] = None
            case Received(peer, ArenaOffered() as offered):
                if peer == self._pool:
                    self._offers.connected(peer, offered.block_bytes)
                self._loads.connected(peer, offered.block_bytes)
                return PoolOutcome([MapArena(peer, offered)])
            case PeerDisconnected(_, peer):
                if peer == self._pool:
                    self._offers.disconnected()
                return PoolOutcome([UnmapArena(peer)], self._loads.disconnected(peer).ready)
            case Received(_, PrefixBlocksReserved() as reserved):
                return PoolOutcome(self._offers.reserved(reserved, now))
            case Received(peer, PrefixFound() as found):
                outcome = self._loads.found(peer, found, now)
                return PoolOutcome(outcome.commands, outcome.ready)
            case BlocksOffloaded():
                return PoolOutcome(self._offers.offloaded(event, now))
            case BlocksLoaded():
                loaded = self._loads.loaded(event, now)
                self._offers.skip(loaded.kept)
                return PoolOutcome(loaded.commands, loaded.ready, loaded.again)
            case Received(_, message):
                raise AssertionError(f"a pool sends no {type(message).__name__} to such a worker")
        return PoolOutcome()
