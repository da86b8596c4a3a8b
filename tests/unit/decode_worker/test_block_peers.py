"""Which prefill workers a decode worker dials, after any history of announcements."""

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core.ids import WorkerName
from alignedserve.messages.events import Dial, StopDialling
from alignedserve.messages.workers import PeersChanged
from decode_worker.block_peers import BlockPeers
from tests.support.samples import POOL

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


NAMES = st.lists(st.sampled_from((ONE, OTHER, THIRD)), max_size=3, unique=True).map(tuple)


@given(st.lists(st.builds(PeersChanged, NAMES, left=NAMES, is_complete=st.booleans())))
def test_what_is_dialled_is_what_was_announced(history: list[PeersChanged]) -> None:
    peers, dialled, announced = BlockPeers(POOL), set[str](), set[str]()
    for message in history:
        for command in peers.changed(message):
            if isinstance(command, Dial):
                assert command.address not in dialled
                dialled.add(command.address)
            else:
                dialled.remove(command.address)
        announced = set() if message.is_complete else announced - set(message.left)
        announced |= set(message.joined)
        assert dialled == announced
