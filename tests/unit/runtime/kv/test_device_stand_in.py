"""Devices with memories of their own: what the stand-in for them refuses, and what workers do on it."""

from pathlib import Path

import pytest

from alignedserve.messages.caches import BlockCopy
from alignedserve.runtime.device.streams import Stream
from alignedserve.runtime.kv.candidate_memory import LentRows
from alignedserve.runtime.kv.staged_copies import CopyLanes
from alignedserve.runtime.kv.transfers.block_server import BlockServer
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest
from alignedserve.runtime.kv.transfers.process_pair import open_channel
from alignedserve.runtime.kv.transfers.requests import ChannelTransfer, DeviceBuffer, IpcTransfer
from tests.harnesses.transfer import CLIENT, OWNER, content, filled, layout_of
from tests.support.devices.device_stand_in import LINK, DeviceTensor, Machine, Refused, StandInDevice, StandInStorage
from tests.support.samples import blocks

LAYOUT = layout_of("float32")


@pytest.fixture
def machine() -> Machine:
    return Machine(seed=1)


def stream_of(device: StandInDevice) -> Stream:
    device.use()
    return device.streams().stream("copies")


def done(stream: Stream) -> None:
    stream.record().synchronize()


# --- what is refused


def test_one_device_reaches_anothers_memory_by_copies_alone(machine: Machine) -> None:
    one, other = machine.device("one"), machine.device("other")
    mine, theirs = one.empty(2, 8), other.empty(2, 8)
    stream = stream_of(one)
    stream.run(lambda: mine.copy_(theirs))
    with pytest.raises(Refused, match="memory of one, other is on no stream"):
        done(stream)
    with pytest.raises(Refused, match="with none of its memory"):
        stream.run_peer(lambda: theirs.copy_(theirs), theirs, theirs, num_rows=2)
    stream.run_peer(lambda: mine.copy_(theirs), theirs, mine, num_rows=2)
    done(stream)
    assert [copy.way for copy in machine.timeline] == [LINK]


def test_a_wait_that_is_missing_shows(machine: Machine) -> None:
    """Without the event between them, one stream reads what another has yet to write, in some order."""

    def read(machine: Machine, *, waits: bool) -> list[int]:
        device = machine.device("one")
        device.use()
        rows, host = device.empty(4, 8), device.pinned(4, 8)
        writer, reader = stream_of(device), stream_of(device)
        writer.run(lambda: rows.fill_(7))
        if waits:
            reader.wait(writer.record())
        reader.copy_out(rows, host)
        done(reader)
        return sorted(set(host.flatten().tolist()))

    assert all(read(Machine(seed), waits=True) == [7] for seed in range(20))
    assert any(read(Machine(seed), waits=False) != [7] for seed in range(20))


# --- what the copies of workers do


def test_a_block_server_chooses_its_buffers_device_in_each_thread(machine: Machine, tmp_path: Path) -> None:
    """Page-locked memory of a thread that has not is the first GPU's, where it takes hundreds of megabytes."""
    owner, client = machine.device("owner"), machine.device("client")
    buffer = DeviceBuffer(LAYOUT, owner.lendable(8, LAYOUT.block_bytes), CopyLanes(owner))
    server = BlockServer(
        buffer, f"unix:{tmp_path}/b", identity=OWNER, transports=("tcp", "cuda_ipc"), open_channel=open_channel
    )
    storage = filled(LAYOUT, 1)
    here = StandInStorage(storage, client)
    client.use()
    through_host = ChannelTransfer(here, server.address, identity=CLIENT, transport="tcp")
    (runs,) = through_host.offload([OffloadRequest(blocks(3, 1), blocks(0, 5), 7)])
    through_host.close()
    assert runs is not None
    assert here.lanes is not None
    over_link = IpcTransfer(here, server.address, identity=CLIENT, lanes=here.lanes)
    assert over_link.fetch([FetchRequest(BlockCopy(7, 15, runs), blocks(9, 8))]) == [True]
    over_link.close()
    server.close()
    assert (content(storage, (9, 8)) == content(storage, (3, 1))).all()
    assert sum(copy.num_bytes for copy in machine.moved(LINK)) == 2 * LAYOUT.block_bytes


def test_a_reader_of_another_devices_memory_opens_nothing_there(machine: Machine, tmp_path: Path) -> None:
    """A context on the owner's GPU would take hundreds of megabytes of it for every process that reads."""
    owner, client = machine.device("owner"), machine.device("client")
    buffer = DeviceBuffer(LAYOUT, owner.lendable(8, LAYOUT.block_bytes), CopyLanes(owner))
    server = BlockServer(
        buffer, f"unix:{tmp_path}/b", identity=OWNER, transports=("cuda_ipc",), open_channel=open_channel
    )
    client.use()
    here = StandInStorage(filled(LAYOUT, 1), client)
    assert here.lanes is not None
    over_link = IpcTransfer(here, server.address, identity=CLIENT, lanes=here.lanes)
    (runs,) = over_link.offload([OffloadRequest(blocks(3, 1), blocks(0, 5), 7)])
    assert runs is not None
    assert over_link.fetch([FetchRequest(BlockCopy(7, 15, runs), blocks(9, 8))]) == [True]
    over_link.close()
    server.close()
    assert owner.num_streams == 0
    assert client.num_streams > 0
    ways = [(copy.source, copy.target, copy.num_bytes) for copy in machine.moved(LINK)]
    size = 2 * LAYOUT.block_bytes
    assert ways == [("client", "owner", size), ("owner", "client", size)]


def test_memory_is_lent_again_once_its_buffer_is_dropped(machine: Machine) -> None:
    device = machine.device("one")
    lent = LentRows(device, 10, LAYOUT.block_bytes)

    def buffer(num_blocks: int) -> DeviceBuffer:
        rows = lent.take(num_blocks)
        made = DeviceBuffer(LAYOUT, rows[:num_blocks], CopyLanes(device))
        lent.give_back_after(made, rows)
        return made

    first, second = buffer(6), buffer(4)
    assert device.num_lent_bytes == 10 * LAYOUT.block_bytes
    del first
    first = buffer(5)  # a reconnected worker, in the memory of before
    assert device.num_lent_bytes == 10 * LAYOUT.block_bytes
    assert isinstance(first.blocks, DeviceTensor)
    assert first.num_blocks == 5
    assert not first.generations.any()
    del first, second
    assert buffer(8).num_blocks == 8  # none is large enough: they make way
    assert device.num_lent_bytes == 18 * LAYOUT.block_bytes
