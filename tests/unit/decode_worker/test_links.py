"""Links of a decode worker to prefill workers and pools: announced, made when needed, closed when unused."""

from alignedserve.core.ids import BatchId, WorkerName
from alignedserve.messages.caches import BatchGranted, LeasesReleased
from alignedserve.messages.events import (
    Dial,
    HangUp,
    PeerConnected,
    PeerDisconnected,
    Received,
    Send,
    StopDialling,
    Ticked,
)
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import UnmapArena
from alignedserve.messages.workers import PeerNeeded, PeersChanged, WorkerLoad
from alignedserve.worker_core.block_peers import BlockPeers
from tests.harnesses.decode import H1, DecodeHarness, loads
from tests.support.samples import POOL, ROUTER

ONE, OTHER, THIRD = (WorkerName(f"prefill-{number}") for number in range(3))


def test_what_joins_is_dialled_once_and_what_has_left_no_more() -> None:
    peers = BlockPeers(POOL)
    assert peers.changed(PeersChanged((ONE, OTHER), is_complete=True)) == [Dial(ONE), Dial(OTHER)]
    assert peers.changed(PeersChanged((OTHER, THIRD))) == [Dial(THIRD)]
    assert peers.changed(PeersChanged((), left=(ONE,))) == [StopDialling(ONE)]
    assert peers.changed(PeersChanged((), left=(ONE,))) == []
    assert peers.changed(PeersChanged((ONE,))) == [Dial(ONE)]


def test_those_that_a_new_router_does_not_know_are_not_dialled() -> None:
    peers = BlockPeers(POOL)
    peers.changed(PeersChanged((ONE, OTHER), is_complete=True))
    assert peers.changed(PeersChanged((OTHER,), is_complete=True)) == [StopDialling(ONE)]


FAR = "pool-7"


def test_a_peer_of_another_node_is_dialled_when_it_is_needed_and_hung_up_on_after_a_minute_without_use() -> None:
    peers = BlockPeers(POOL)
    assert peers.needed(FAR, 0.0) == [Dial(FAR)]
    assert peers.needed(FAR, 1.0) == []
    assert peers.hang_up_unused(60.9, set) == []
    assert peers.hang_up_unused(61.0, set) == [HangUp(FAR)]
    assert peers.hang_up_unused(200.0, set) == []
    assert peers.needed(FAR, 201.0) == [Dial(FAR)]


def test_a_link_over_which_something_is_held_is_kept_and_for_a_minute_after_it() -> None:
    peers = BlockPeers(POOL)
    peers.needed(FAR, 0.0)
    assert peers.hang_up_unused(100.0, lambda: {FAR, POOL, "pool-8"}) == []
    assert peers.hang_up_unused(159.0, set) == []
    assert peers.hang_up_unused(160.0, set) == [HangUp(FAR)]


def test_those_of_its_own_node_are_linked_for_as_long_as_they_are_announced() -> None:
    peers = BlockPeers(POOL)
    peers.changed(PeersChanged((ONE,)))
    assert peers.needed(ONE, 0.0) == peers.needed(POOL, 0.0) == []
    assert peers.hang_up_unused(1e6, set) == []
    peers.needed(OTHER, 0.0)
    assert peers.changed(PeersChanged((OTHER,))) == []  # dialled already
    assert peers.hang_up_unused(1e6, set) == []


FAR_POOL, FAR_PREFILL = "pool-7", "prefill-7"


def linked(made: DecodeHarness, peer: str = FAR_POOL, role: Role = Role.KV_POOL) -> None:
    assert made.hear(PeerNeeded(WorkerName(peer))) == [Dial(peer)]
    made.do(PeerConnected(role, peer))


def ticked(made: DecodeHarness, now: float) -> list[object]:
    made.now = now
    return [one for one in made.do(Ticked()) if isinstance(one, HangUp)]


def test_the_router_hears_that_the_link_is_there() -> None:
    made = DecodeHarness()
    made.hear(PeerNeeded(WorkerName(FAR_POOL)))
    made.logic.on_event(Ticked(), 0.0)
    commands = made.logic.on_event(PeerConnected(Role.KV_POOL, FAR_POOL), 0.0)
    assert [type(one.message) for one in commands if isinstance(one, Send) and one.peer == ROUTER] == [WorkerLoad]


def test_a_link_without_use_is_closed_after_a_minute_and_made_anew() -> None:
    made = DecodeHarness()
    linked(made)
    assert ticked(made, 59.0) == []
    assert ticked(made, 60.0) == [HangUp(FAR_POOL)]
    assert made.do(PeerDisconnected(Role.KV_POOL, FAR_POOL)) == [UnmapArena(FAR_POOL)]
    assert made.hear(PeerNeeded(WorkerName(FAR_POOL))) == [Dial(FAR_POOL)]


def test_a_pool_whose_lease_is_held_keeps_its_link() -> None:
    made = DecodeHarness()
    linked(made)
    (copied,) = loads(made.do(Received(FAR_POOL, BatchGranted(BatchId(1), (H1,), None, is_aligned=True))))
    for now in (50.0, 100.0, 159.0):  # the copy hangs
        assert ticked(made, now) == []
    assert Send(FAR_POOL, LeasesReleased((H1.lease_id,))) in made.loaded(copied)
    assert ticked(made, 218.0) == []
    assert ticked(made, 219.0) == [HangUp(FAR_POOL)]


def test_a_buffer_without_anything_in_it_keeps_no_link() -> None:
    made = DecodeHarness()
    linked(made, FAR_PREFILL, Role.PREFILL_WORKER)
    made.lend(8, FAR_PREFILL)
    assert ticked(made, 60.0) == [HangUp(FAR_PREFILL)]
