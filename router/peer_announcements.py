"""Tells decode workers with which prefill workers and pools they exchange blocks.

The decode worker dials a link to each prefill worker of its node: a later one is announced, and a lost one is no longer
dialled until it registers again. Links to other nodes are made when the router is about to let blocks go that way, and
kept while that happens now and then: linking everything would be millions of links between thousands of nodes.
"""

from collections.abc import Iterable

from alignedserve.core.ids import WorkerName
from alignedserve.messages.events import Send
from alignedserve.messages.workers import PeerNeeded, PeersChanged, WorkerRegistered
from router.state import WorkerRecord


def announce_all(decoder: WorkerRecord, workers: Iterable[WorkerRecord]) -> list[Send]:
    if decoder.registered.can_move:
        before = [worker.name for worker in workers if _are_linked(worker, decoder) and worker.name < decoder.name]
        return [Send(decoder.name, PeersChanged(_names(*before), is_complete=True))]
    if not _is_decoder(decoder.registered):
        return []
    near = [worker.name for worker in workers if _is_prefiller(worker.registered) and _is_near(worker, decoder)]
    return [Send(decoder.name, PeersChanged(_names(*near), is_complete=True))]


def announce_prefiller(
    prefiller: WorkerRecord, workers: Iterable[WorkerRecord], *, is_lost: bool = False
) -> list[Send]:
    """Announce a worker that hands requests over, or its loss, to the node's workers that dial it."""
    if prefiller.registered.can_move:
        after = [worker for worker in workers if _are_linked(worker, prefiller) and worker.name > prefiller.name]
        return [Send(worker.name, _change(prefiller.name, is_lost=is_lost)) for worker in after]
    if not _is_prefiller(prefiller.registered):
        return []
    message = _change(prefiller.name, is_lost=is_lost)
    return [
        Send(worker.name, message)
        for worker in workers
        if _is_decoder(worker.registered) and _is_near(worker, prefiller)
    ]


def need_pool(pool: str, decoder: WorkerRecord) -> list[Send]:
    return [] if decoder.registered.pool_name == pool else [Send(decoder.name, PeerNeeded(WorkerName(pool)))]


def need_prefiller(prefiller: WorkerRecord, decoder: WorkerRecord) -> list[Send]:
    """Tell a decode worker that this prefill worker is about to hand a request to it, unless it is of its node."""
    return [] if _is_near(prefiller, decoder) else [Send(decoder.name, PeerNeeded(WorkerName(prefiller.name)))]


def need_receiver(giver: WorkerRecord, receiver: WorkerRecord) -> list[Send]:
    return [Send(giver.name, PeerNeeded(WorkerName(receiver.name)))]


def _change(name: str, *, is_lost: bool) -> PeersChanged:
    return PeersChanged((), left=_names(name)) if is_lost else PeersChanged(_names(name))


def _names(*names: str) -> tuple[WorkerName, ...]:
    return tuple(map(WorkerName, names))


def _is_near(worker: WorkerRecord, other: WorkerRecord) -> bool:
    return worker.registered.pool_name == other.registered.pool_name


def _is_prefiller(registered: WorkerRegistered) -> bool:
    return registered.can_prefill and not registered.can_decode


def _are_linked(worker: WorkerRecord, other: WorkerRecord) -> bool:
    return worker.registered.can_move and worker.registered.pool_name == other.registered.pool_name


def _is_decoder(registered: WorkerRegistered) -> bool:
    return registered.can_decode and not registered.can_prefill
