"""The decode worker's links to prefill workers and pools of other nodes: made when needed, closed when unused."""

from alignedserve.core.ids import BatchId, WorkerName
from alignedserve.messages.caches import BatchGranted, LeasesReleased
from alignedserve.messages.events import Dial, HangUp, PeerConnected, PeerDisconnected, Received, Send, Ticked
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import UnmapArena
from alignedserve.messages.workers import PeerNeeded, WorkerLoad
from tests.harnesses.decode import H1, DecodeHarness, loads
from tests.support.samples import ROUTER

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
    commands = made.do(Received(FAR_POOL, BatchGranted(BatchId(1), (H1,), None, is_aligned=True)))
    (copied,) = loads(commands)
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
