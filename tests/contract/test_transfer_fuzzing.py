"""Whatever arrives, at either end: never accepted when it is wrong, never a crash, never a hang."""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import HandoffRejected, PeerLost, ProtocolError
from alignedserve.messages.blocks import (
    BlocksAnswered,
    NamedBlocks,
    OpenTransfer,
    ReadBlocks,
    RendezvousValue,
    WriteBlocks,
)
from alignedserve.messages.caches import BlockCopy, BlockRun
from alignedserve.messages.handshake import Challenge, Hello, Ping, Role, Welcome
from alignedserve.messages.wire import PROTOCOL_VERSION, Codec, Message
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.transfers.block_server import BlockServer
from alignedserve.runtime.kv.transfers.control_socket import ControlSocket, dial
from alignedserve.runtime.kv.transfers.host_blocks import ArenaBuffer
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest
from alignedserve.runtime.kv.transfers.process_pair import open_channel
from alignedserve.runtime.kv.transfers.requests import ChannelTransfer, negotiate
from tests.harnesses.transfer import (
    BLOCK_SIZE,
    CLIENT,
    IN_SLOW_TESTS,
    MEDIA,
    NUM_POOL_BLOCKS,
    NUM_STORAGE_BLOCKS,
    OWNER,
    ServedMedium,
    Setup,
    content,
    filled,
    layout_of,
)
from tests.support.marks import each
from tests.support.samples import blocks

pytestmark = pytest.mark.slow

SOURCES = ([3, 1, 2], [9], [14, 0, 15, 7, 8])
# One medium for all examples of a test: making a pair costs more than using it.
REPEATED = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
NUMBERS = st.one_of(
    st.integers(-2, NUM_POOL_BLOCKS + 2), st.sampled_from([-(1 << 63), 1 << 33, 1 << 40, (1 << 40) + 1, (1 << 64) - 1])
)


@pytest.fixture(scope="module", params=[name for name in MEDIA if name not in IN_SLOW_TESTS])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    layout = layout_of("float32")
    medium = MEDIA[request.param](tmp_path_factory.mktemp("medium"), layout)
    yield Setup(medium, layout, filled(layout, 1), filled(layout, 2))
    medium.close()


@pytest.fixture(scope="module")
def copies(setup: Setup) -> list[BlockCopy]:
    return [setup.send(BLOCK_SIZE * len(source) - 2, source) for source in SOURCES]


# --- copies that are not what was written


@st.composite
def changed_runs(draw: st.DrawFn, runs: tuple[BlockRun, ...]) -> tuple[BlockRun, ...]:
    changed = list(runs)
    for _ in range(draw(st.integers(0, 3))):
        if not changed:
            break
        place = draw(st.integers(0, len(changed) - 1))
        run = changed[place]
        match draw(st.sampled_from(["drop", "repeat", "swap", "first", "count", "sum", "flip"])):
            case "drop":
                del changed[place]
            case "repeat":
                changed.insert(draw(st.integers(0, len(changed))), run)
            case "swap":
                other = draw(st.integers(0, len(changed) - 1))
                changed[place], changed[other] = changed[other], changed[place]
            case "first":
                changed[place] = BlockRun(draw(NUMBERS), run.num_blocks, run.checksum)
            case "count":
                changed[place] = BlockRun(run.first_block, draw(NUMBERS), run.checksum)
            case "sum":
                changed[place] = BlockRun(run.first_block, run.num_blocks, draw(NUMBERS))
            case "flip":
                flipped = run.checksum ^ (1 << draw(st.integers(0, 63)))
                changed[place] = BlockRun(run.first_block, run.num_blocks, flipped)
    return tuple(changed)


@REPEATED
@given(st.data())
def test_changed_copies_are_refused_or_right(setup: Setup, copies: list[BlockCopy], data: st.DataObject) -> None:
    """Several in one call, whole ones among them: each is judged for itself."""
    choices = data.draw(st.lists(st.integers(0, len(SOURCES) - 1), min_size=1, max_size=3))
    incoming, room = [], list(range(NUM_STORAGE_BLOCKS))
    for choice in choices:
        copy = copies[choice]
        generation = data.draw(st.one_of(st.just(copy.generation), NUMBERS))
        context_len = data.draw(st.one_of(st.just(copy.context_len), NUMBERS))
        spoilt = BlockCopy(generation, context_len, data.draw(changed_runs(copy.runs)))
        into, room = room[: len(SOURCES[choice])], room[len(SOURCES[choice]) :]
        incoming.append(FetchRequest(spoilt, blocks(*into)))
    for one, choice, is_held in zip(incoming, choices, setup.receiving.fetch(incoming), strict=True):
        whole = copies[choice]
        if (one.copy.generation, one.copy.runs) == (whole.generation, whole.runs):
            is_same_size = blocks_for(one.copy.context_len, BLOCK_SIZE) == len(SOURCES[choice])
            assert is_held == (is_same_size and len(one.storage_block_ids) == len(SOURCES[choice]))
        if is_held:  # the whole copy, or a shorter context at the beginning of it
            count = blocks_for(one.copy.context_len, BLOCK_SIZE)
            targets, source = one.storage_block_ids[:count], SOURCES[choice][:count]
            assert (content(setup.receiver, targets) == content(setup.sender, source)).all()


@REPEATED
@given(st.data())
def test_a_changed_byte_in_between_is_refused(setup: Setup, copies: list[BlockCopy], data: st.DataObject) -> None:
    choice = data.draw(st.integers(0, len(SOURCES) - 1))
    run = data.draw(st.sampled_from(copies[choice].runs))
    block_id = blocks(run.first_block + data.draw(st.integers(0, run.num_blocks - 1)))[0]
    offset = data.draw(st.integers(0, setup.layout.block_bytes - 1))
    setup.medium.flip(block_id, offset)
    assert setup.fetch(copies[choice], *range(len(SOURCES[choice]))) is None
    setup.medium.flip(block_id, offset)
    setup.expect(copies[choice], range(len(SOURCES[choice])), SOURCES[choice])


@REPEATED
@given(
    target=st.lists(NUMBERS, max_size=4).map(lambda numbers: blocks(*numbers)),
    generation=NUMBERS,
    num_sent=st.integers(0, 4),
)
def test_offloads_into_anywhere_are_refused_or_readable(
    setup: Setup, copies: list[BlockCopy], target: tuple[int, ...], generation: int, num_sent: int
) -> None:
    """Into blocks of no other test's copies, each again and again: enough examples would fill all that are empty."""
    held = {run.first_block + place for copy in copies for run in copy.runs for place in range(run.num_blocks)}
    free = [number for number in range(NUM_POOL_BLOCKS) if number not in held]
    where = blocks(*(free[number % len(free)] if 0 <= number < NUM_POOL_BLOCKS else number for number in target))
    (runs,) = setup.sending.offload([OffloadRequest(blocks(*range(num_sent)), where, generation)])
    if runs is not None and num_sent:
        setup.expect(BlockCopy(generation, num_sent * BLOCK_SIZE, runs), range(num_sent), range(num_sent))


# --- a server that is told nonsense


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedMedium]:
    folder = tmp_path_factory.mktemp("served")
    medium = ServedMedium(folder, layout_of("float32"), transport="gloo", address=f"unix:{folder}/b.sock")
    yield medium
    medium.close()


def still_serves(served: ServedMedium) -> None:
    storage = filled(served.layout, 1)
    transfer = served.transfer(storage)
    (runs,) = transfer.offload([OffloadRequest(blocks(1, 2), blocks(5, 6), 7)])
    assert runs is not None
    assert transfer.fetch([FetchRequest(BlockCopy(7, 16, runs), blocks(1, 2))]) == [True]
    transfer.close()


def raw(served: ServedMedium) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10.0)
    connection.connect(served.server.address.removeprefix("unix:"))
    return connection


def ends(connection: socket.socket) -> bool:
    """Return whether the server disconnects, after any messages."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    finally:
        connection.close()
    return True


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(garbage=st.one_of(st.binary(min_size=1, max_size=300), st.integers(0, 8000).map(lambda n: struct.pack("<I", n))))
def test_garbage_before_the_proof(served: ServedMedium, garbage: bytes) -> None:
    connection = raw(served)
    try:
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
    except ConnectionError:
        pass
    assert ends(connection)


EVERYTHING = Codec(OpenTransfer | WriteBlocks | ReadBlocks | RendezvousValue | Hello | Welcome | Ping)
HUGE = 1 << 40
NONSENSE: dict[str, list[Message | bytes]] = {
    "a request before the transfer is opened": [ReadBlocks(())],
    "another message": [Ping(1.0)],
    "another layout": [OpenTransfer("gloo", "00")],
    "another transport": [OpenTransfer("carrier pigeon", layout_of("float32").digest().hex())],
    "a part of another rank than there is": [OpenTransfer("gloo", layout_of("float32").digest().hex(), 2, 2)],
    "a part of none": [OpenTransfer("gloo", layout_of("float32").digest().hex(), 0, 0)],
    "a part too small": [OpenTransfer("gloo", layout_of("float32").digest().hex(), 1, HUGE)],
    "a message of the other side": [Welcome(Role.ROUTER, "x", bytes(32))],
    "not MessagePack": [struct.pack("<I", 3) + b"\xc1\xc1\xc1"],
    "cut short": [struct.pack("<I", 30) + b"abc"],
    "absurdly long": [struct.pack("<I", 0xFFFFFFFF)],
    "nothing": [b""],
}


@each("what", NONSENSE)
def test_nonsense_after_the_proof(served: ServedMedium, what: str) -> None:
    control = dial(served.server.address, CLIENT)
    for part in NONSENSE[what]:
        payload = part if isinstance(part, bytes) else EVERYTHING.encode(part)
        framed = payload if isinstance(part, bytes) else struct.pack("<I", len(payload)) + payload
        control._socket.sendall(framed)
    control._socket.shutdown(socket.SHUT_WR)
    assert ends(control._socket)
    still_serves(served)


def test_an_end_of_another_layout_is_told_so(served: ServedMedium) -> None:
    other = BlockStorage(BlockLayout(BLOCK_SIZE, 2, 4, 2, "float32"), 4)  # of the same size
    with pytest.raises(HandoffRejected, match="layouts of the two ends differ"):
        served.transfer(other)
    still_serves(served)


QUESTIONS: dict[str, Message] = {
    "more than there is": ReadBlocks((NamedBlocks(7, ((0, HUGE),)),)),
    "more than there is, in parts": WriteBlocks((NamedBlocks(7, ((0, 1),) * 1000),)),
    "too many requests": ReadBlocks((NamedBlocks(7, ((0, NUM_POOL_BLOCKS),)),) * 100),
    "opened again": OpenTransfer("gloo", ""),
    "a value out of turn": RendezvousValue("0/0", b""),
}


@each("what", QUESTIONS)
def test_questions_that_no_peer_of_ours_asks_end_the_connection(served: ServedMedium, what: str) -> None:
    transfer = served.transfer(filled(served.layout, 1))
    assert isinstance(transfer, ChannelTransfer)
    transfer._control.send(QUESTIONS[what])
    assert ends(transfer._control._socket)
    with pytest.raises(PeerLost):
        transfer.offload([OffloadRequest(blocks(1), blocks(5), 7)])
    still_serves(served)


@each(
    ("named", "expected"),
    [
        (NamedBlocks(7, ((NUM_POOL_BLOCKS, 1),)), False),
        (NamedBlocks(7, ((HUGE, 1),)), False),
        (NamedBlocks(7, ((3, 0), (3, 1))), False),
        (NamedBlocks(0, ((3, 1),)), False),
        (NamedBlocks(HUGE, ((3, 1),)), False),
        (NamedBlocks(7, ()), True),
    ],
)
def test_a_request_that_does_not_hold_is_refused_by_the_owner(
    served: ServedMedium, named: NamedBlocks, expected: bool
) -> None:
    """The client end would not send these: the owner checks for itself."""
    transfer = served.transfer(filled(served.layout, 1))
    assert isinstance(transfer, ChannelTransfer)
    transfer._control.send(ReadBlocks((named,)))
    assert [transfer._control.receive(), transfer._control.receive()] == [BlocksAnswered((expected,))] * 2
    transfer.close()


# --- who may speak at all


def test_a_peer_without_the_secret_is_refused(served: ServedMedium) -> None:
    stranger = replace(CLIENT, secret=b"x" * 32)
    with pytest.raises((PeerLost, ProtocolError)):
        ChannelTransfer(filled(served.layout, 1), served.server.address, identity=stranger)
    still_serves(served)


def test_a_server_without_the_secret_is_refused(tmp_path: Path) -> None:
    """A listener that accepts any proof, but cannot prove itself."""
    path = str(tmp_path / "false.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        with pytest.raises(ProtocolError, match="secret"):
            _dial_while_answered(path, listener)


def _dial_while_answered(path: str, listener: socket.socket) -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        control = ControlSocket(connection, 5.0)
        control.send(Challenge(PROTOCOL_VERSION, bytes(32)))
        control.receive()
        control.send(Welcome(OWNER.role, OWNER.name, bytes(32)))
        control.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        dial(f"unix:{path}", CLIENT)
    finally:
        thread.join()


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[BlockServer]:
    arena = Arena.create(tmp_path / "a.arena", layout_of("float32"), NUM_POOL_BLOCKS)
    owner = replace(OWNER, peer_timeout_s=0.5)
    server = BlockServer(
        ArenaBuffer(arena), f"unix:{tmp_path}/b.sock", identity=owner, transports=("gloo",), open_channel=open_channel
    )
    yield server
    server.close()
    arena.close(unlink=True)


def hangs_up_in_time(connection: socket.socket) -> bool:
    started_s = time.monotonic()
    return ends(connection) and time.monotonic() - started_s < 8.0


def test_a_peer_that_says_nothing_is_dropped(impatient: BlockServer) -> None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10.0)
    connection.connect(impatient.address.removeprefix("unix:"))
    assert hangs_up_in_time(connection)


@pytest.mark.parametrize(
    "said",
    [[], [RendezvousValue("0/1", b"nowhere")], [RendezvousValue("", b"")], [ReadBlocks(())]],
    ids=["nothing", "nonsense", "another entry", "another message"],
)
def test_a_peer_that_does_not_make_its_pair_is_dropped(impatient: BlockServer, said: list[Message]) -> None:
    control = dial(impatient.address, CLIENT)
    assert negotiate(control, "gloo", BlockStorage(layout_of("float32"), 1)).num_blocks == NUM_POOL_BLOCKS
    for message in said:
        control.send(message)
    assert hangs_up_in_time(control._socket)
    while impatient.num_peers:
        time.sleep(0.01)


def test_bytes_that_never_come_end_the_connection(impatient: BlockServer) -> None:
    transfer = ChannelTransfer(filled(layout_of("float32"), 1), impatient.address, identity=CLIENT)
    transfer._control.send(WriteBlocks((NamedBlocks(7, ((0, 5),)),)))
    assert hangs_up_in_time(transfer._control._socket)


def test_a_refused_transport_says_what_there_is(served: ServedMedium) -> None:
    with pytest.raises(HandoffRejected, match="served by gloo, not by 'tcp'"):
        ChannelTransfer(filled(served.layout, 1), served.server.address, identity=CLIENT, transport="tcp")
