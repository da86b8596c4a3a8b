"""Tells decode workers which prefill workers and pools there are: the router alone knows who has joined or is gone.

Two processes that exchange blocks have a link of their own, which the decode worker dials: to the prefill workers of
all nodes and to the pools of other nodes. One that joins later, on any node, is announced to those that are there; one
that is lost is no longer dialled, until it has registered again.
"""

from collections.abc import Collection, Iterable

from alignedserve.core.ids import WorkerName
from alignedserve.messages.events import Send
from alignedserve.messages.workers import PeersChanged, WorkerRegistered
from router.state import WorkerRecord


def announce_all(decoder: WorkerRecord, workers: Iterable[WorkerRecord], pools: Collection[str]) -> list[Send]:
    """Announce everything to a worker that has registered, if it is a decode worker."""
    if decoder.registered.can_move:
        before = [one.name for one in workers if _are_linked(one, decoder) and one.name < decoder.name]
        return [Send(decoder.name, PeersChanged(_names(*before), is_complete=True))]
    if not _is_decoder(decoder.registered):
        return []
    prefillers = [one.name for one in workers if _is_prefiller(one.registered)]
    far_pools = [pool for pool in pools if pool != decoder.registered.pool_name]
    return [Send(decoder.name, PeersChanged(_names(*prefillers, *far_pools), is_complete=True))]


def announce_prefiller(
    prefiller: WorkerRecord, workers: Iterable[WorkerRecord], *, is_lost: bool = False
) -> list[Send]:
    """Announce a worker to all decode workers if it is a prefill worker, or that it is lost.

    One that hands requests over is announced to those of its node, of which the later by name dials.
    """
    if prefiller.registered.can_move:
        after = [one for one in workers if _are_linked(one, prefiller) and one.name > prefiller.name]
        return [Send(one.name, _change(prefiller.name, is_lost=is_lost)) for one in after]
    if not _is_prefiller(prefiller.registered):
        return []
    message = _change(prefiller.name, is_lost=is_lost)
    return [Send(one.name, message) for one in workers if _is_decoder(one.registered)]


def announce_pool(pool: str, workers: Iterable[WorkerRecord], *, is_lost: bool = False) -> list[Send]:
    """Announce a pool to the decode workers of other nodes, or that it is lost; those of its own know it."""
    message = _change(pool, is_lost=is_lost)
    far = [one for one in workers if _is_decoder(one.registered) and one.registered.pool_name != pool]
    return [Send(one.name, message) for one in far]


def _change(name: str, *, is_lost: bool) -> PeersChanged:
    return PeersChanged((), left=_names(name)) if is_lost else PeersChanged(_names(name))


def _names(*names: str) -> tuple[WorkerName, ...]:
    return tuple(map(WorkerName, names))


def _is_prefiller(registered: WorkerRegistered) -> bool:
    """Return whether it hands requests over; a colocated worker keeps them."""
    return registered.can_prefill and not registered.can_decode


def _are_linked(one: WorkerRecord, other: WorkerRecord) -> bool:
    """Return whether these hand requests over to each other."""
    return one.registered.can_move and one.registered.pool_name == other.registered.pool_name


def _is_decoder(registered: WorkerRegistered) -> bool:
    """Return whether it takes requests over from prefill workers."""
    return registered.can_decode and not registered.can_prefill
