"""Tells decode workers which prefill workers there are: the router alone knows who has joined and who is gone.

A pair of workers exchanges blocks over a link of its own, which the decode worker dials. A worker that joins later, on
any node, is announced to those that are there; one that is lost is no longer dialled, until it has registered again.
"""

from collections.abc import Iterable

from alignedserve.core.ids import WorkerName
from alignedserve.messages.events import Send
from alignedserve.messages.workers import PeersChanged, WorkerRegistered
from router.state import WorkerRecord


def announce_joined(joined: WorkerRecord, workers: Iterable[WorkerRecord]) -> list[Send]:
    """Announce a worker that has registered: all prefill workers to a decode worker, or it to all decode workers."""
    if _is_decoder(joined.registered):
        known = tuple(WorkerName(one.name) for one in workers if _is_prefiller(one.registered))
        return [Send(joined.name, PeersChanged(known, is_complete=True))]
    if not _is_prefiller(joined.registered):
        return []
    return _to_decoders(workers, PeersChanged((WorkerName(joined.name),)))


def announce_left(left: WorkerRecord, workers: Iterable[WorkerRecord]) -> list[Send]:
    """Tell the decode workers not to dial a prefill worker that is lost."""
    if not _is_prefiller(left.registered):
        return []
    return _to_decoders(workers, PeersChanged((), left=(WorkerName(left.name),)))


def _to_decoders(workers: Iterable[WorkerRecord], message: PeersChanged) -> list[Send]:
    return [Send(one.name, message) for one in workers if _is_decoder(one.registered)]


def _is_prefiller(registered: WorkerRegistered) -> bool:
    """Return whether it hands requests over; a colocated worker keeps them."""
    return registered.can_prefill and not registered.can_decode


def _is_decoder(registered: WorkerRegistered) -> bool:
    """Return whether it takes requests over from prefill workers."""
    return registered.can_decode and not registered.can_prefill
