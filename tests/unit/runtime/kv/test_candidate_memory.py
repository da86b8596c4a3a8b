"""The memory that a prefill worker lends: buffers are made, replaced and given back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from alignedserve.messages.caches import BlockCopy
from alignedserve.messages.handshake import Role
from alignedserve.process.addresses import AddressBook
from alignedserve.process.links import Identity
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.process.tls import CertificateAuthority
from alignedserve.runtime.kv.arena_files import arena_folder
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.buffer_budget import BufferBudget
from alignedserve.runtime.kv.candidate_memory import CandidateMemory
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.staged_copies import CopyLanes
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest
from alignedserve.runtime.kv.transfers.registry import open_transfer
from alignedserve.runtime.kv.transfers.requests import DeviceBuffer
from tests.harnesses.transfer import layout_of
from tests.support.devices.device_stand_in import Machine, StandInDevice
from tests.support.samples import DECODE, PREFILL, blocks
from tests.support.stored_blocks import read_blocks, write_blocks

LAYOUT = layout_of("float32")


def memory_of(folder: Path, num_blocks: int = 6, transport: str = "auto") -> CandidateMemory:
    process_spec = ProcessSpec(Role.PREFILL_WORKER, PREFILL, folder.name, b"t" * 32, 5.0, AddressBook(folder), folder)
    budget = BufferBudget(2 * num_blocks, (DECODE, "decode-1"))
    return CandidateMemory(LAYOUT, budget, process_spec, transport=transport)


def files(folder: Path) -> list[Path]:
    return list(arena_folder().glob(f"alignedserve-{folder.name}-*"))


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[CandidateMemory]:
    made = memory_of(tmp_path)
    yield made
    made.close()


def test_what_a_killed_process_lent_is_removed_when_it_starts_again(tmp_path: Path) -> None:
    alive = memory_of(tmp_path)
    kept = alive.open_for(DECODE)
    assert kept is not None
    left = arena_folder() / f"alignedserve-{tmp_path.name}-{PREFILL}-for-{DECODE}-7.arena"
    left.write_bytes(b"0")  # no process holds its lock
    memory_of(tmp_path)
    assert files(tmp_path) == [Path(kept.offered.path)]
    alive.close()


def test_a_buffer_is_made_as_it_is_offered(memory: CandidateMemory) -> None:
    opened = memory.open_for(DECODE)
    assert opened is not None
    attached = Arena.attach(Path(opened.offered.path), LAYOUT)
    assert (attached.num_blocks, attached.file_id) == (opened.offered.num_blocks, opened.offered.file_id)
    assert opened.offered.num_blocks == 6
    assert (opened.offered.transports, opened.offered.served_at) == (("shm",), "")
    attached.close()


def test_a_decode_worker_that_comes_back_gets_a_fresh_one(memory: CandidateMemory, tmp_path: Path) -> None:
    first, second = memory.open_for(DECODE), memory.open_for(DECODE)
    assert first is not None
    assert second is not None
    assert first.offered.path != second.offered.path
    assert files(tmp_path) == [Path(second.offered.path)]


def test_a_lost_decode_workers_buffer_is_removed(memory: CandidateMemory, tmp_path: Path) -> None:
    memory.open_for(DECODE)
    memory.close_for(DECODE)
    memory.close_for(DECODE)
    assert files(tmp_path) == []


def test_without_memory_the_decode_worker_does_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert memory_of(tmp_path, num_blocks=1 << 40).open_for(DECODE) is None
    assert "no candidate buffer for decode-0" in caplog.text
    assert "prefill.candidate_buffer_bytes" in caplog.text
    assert files(tmp_path) == []


def test_what_cannot_be_served_leaves_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = memory_of(tmp_path / ("x" * 100), transport="tcp")
    assert memory.open_for(DECODE) is None
    assert "cannot be served" in caplog.text
    assert files(tmp_path / ("x" * 100)) == []


def test_a_served_buffer_fits_wherever_the_process_s_own_socket_does(tmp_path: Path) -> None:
    memory = memory_of(tmp_path, transport="tcp")
    opened = memory.open_for(DECODE)
    assert opened is not None
    assert len(opened.offered.served_at) <= len(AddressBook(tmp_path).of("prefill-1023"))
    memory.close()


@pytest.mark.parametrize("has_tls", [True, False])
def test_a_decode_worker_of_another_node_reaches_its_buffer_over_tcp(tmp_path: Path, has_tls: bool) -> None:
    authority = CertificateAuthority.new("test")
    book = AddressBook(tmp_path, "node-0", "127.0.0.1", NoDirectory(), has_tls=has_tls)
    own = ProcessSpec(
        Role.PREFILL_WORKER,
        PREFILL,
        tmp_path.name,
        b"t" * 32,
        5.0,
        book,
        tmp_path,
        credentials=authority.issue(PREFILL),
    )
    memory = CandidateMemory(LAYOUT, BufferBudget(12, (DECODE,), may_grow=True), own)
    near, far = memory.open_for(DECODE), memory.open_for("decode-9")
    assert near is not None
    assert far is not None
    assert (near.offered.transports, near.offered.num_blocks) == (("shm",), 6)
    assert (far.offered.transports, far.offered.num_blocks, far.offered.pool_name) == (("shm", "tcp"), 3, "pool-0")
    assert far.offered.served_at.startswith("tls:127.0.0.1:" if has_tls else "tcp:127.0.0.1:")
    there = BlockStorage(LAYOUT, 4)
    content = np.arange(2 * LAYOUT.block_bytes, dtype=np.uint8).reshape(2, -1)
    write_blocks(there, blocks(0, 1), content)
    identity = Identity(Role.DECODE_WORKER, "decode-9", b"t" * 32, 5.0, authority.issue("decode-9"))
    elsewhere = msgspec.structs.replace(far.offered, path="/nowhere")  # as on a host without that file
    transfer = open_transfer(elsewhere, there, identity=identity, stamps=True)
    (runs,) = transfer.offload([OffloadRequest(blocks(0, 1), blocks(2, 0), 7)])
    assert runs is not None
    copy = BlockCopy(7, 2 * LAYOUT.block_size, runs)
    assert transfer.fetch([FetchRequest(copy, blocks(3, 2))]) == [True]
    assert np.array_equal(read_blocks(there, blocks(3, 2)), content)
    transfer.close()
    memory.close()


# --- on a device


def on_device(folder: Path, device: StandInDevice, **options: Any) -> CandidateMemory:
    process_spec = ProcessSpec(Role.PREFILL_WORKER, PREFILL, folder.name, b"t" * 32, 5.0, AddressBook(folder), folder)
    return CandidateMemory(
        LAYOUT, BufferBudget(12, (DECODE, "decode-1")), process_spec, lanes=CopyLanes(device), **options
    )


@pytest.mark.parametrize(("transport", "offered"), [("auto", ("cuda_ipc", "tcp")), ("cuda_ipc", ("cuda_ipc",))])
def test_a_worker_on_a_device_lends_its_memory(transport: str, offered: tuple[str, ...], tmp_path: Path) -> None:
    device = Machine().device(PREFILL)
    memory = on_device(tmp_path, device, transport=transport)
    opened = memory.open_for(DECODE)
    assert opened is not None
    assert opened.offered.transports == offered
    assert isinstance(opened.memory, DeviceBuffer)
    assert opened.offered.path == ""
    assert device.num_lent_bytes == 6 * LAYOUT.block_bytes
    memory.close()


class NoDirectory:
    """Never asked: blocks are reached by the address that was offered."""

    def publish(self, name: str, entry: str) -> None:
        raise AssertionError(name)

    def look_up(self, name: str) -> str | None:
        raise AssertionError(name)
