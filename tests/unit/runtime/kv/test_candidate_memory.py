"""The memory that a prefill worker lends: buffers are made, replaced and given back."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from alignedserve.messages.handshake import Role
from alignedserve.runtime.kv.arena_files import arena_folder
from alignedserve.runtime.kv.candidate_memory import BufferSizes, CandidateMemory
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.process.addresses import AddressBook
from alignedserve.runtime.process.process_spec import ProcessSpec
from tests.harnesses.transfer import layout_of
from tests.support.samples import DECODE, PREFILL

LAYOUT = layout_of("float32")


def memory_of(folder: Path, num_blocks: int = 6, transport: str = "auto") -> CandidateMemory:
    process_spec = ProcessSpec(Role.PREFILL_WORKER, PREFILL, folder.name, b"t" * 32, 5.0, AddressBook(folder), folder)
    return CandidateMemory(LAYOUT, BufferSizes(num_blocks, transport), process_spec)


def files(folder: Path) -> list[Path]:
    return list(arena_folder().glob(f"alignedserve-{folder.name}-*"))


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[CandidateMemory]:
    made = memory_of(tmp_path)
    yield made
    made.close()


def test_a_buffer_is_made_as_it_is_offered(memory: CandidateMemory) -> None:
    opened = memory.open_for(DECODE)
    assert opened is not None
    attached = Arena.attach(Path(opened.offered.path), LAYOUT)
    assert (attached.num_blocks, attached.file_id) == (opened.offered.num_blocks, opened.offered.file_id)
    assert opened.offered.num_blocks == 6
    assert (opened.offered.transports, opened.offered.served_at) == (("shm",), "")
    attached.close()


def test_every_decode_worker_has_one_of_its_own(memory: CandidateMemory, tmp_path: Path) -> None:
    memory.open_for(DECODE)
    memory.open_for("decode-1")
    assert len(files(tmp_path)) == 2


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


def test_all_are_removed_at_the_end(memory: CandidateMemory, tmp_path: Path) -> None:
    memory.open_for(DECODE)
    memory.open_for("decode-1")
    memory.close()
    assert files(tmp_path) == []


def test_without_blocks_none_is_made(tmp_path: Path) -> None:
    assert memory_of(tmp_path, num_blocks=0).open_for(DECODE) is None
    assert files(tmp_path) == []


def test_without_memory_the_decode_worker_does_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert memory_of(tmp_path, num_blocks=1 << 40).open_for(DECODE) is None
    assert "no candidate buffer for decode-0" in caplog.text
    assert "prefill.candidate_buffer_bytes" in caplog.text
    assert files(tmp_path) == []


def test_over_another_transport_it_is_served_as_well(tmp_path: Path) -> None:
    memory = memory_of(tmp_path, transport="gloo")
    opened = memory.open_for(DECODE)
    assert opened is not None
    assert opened.offered.transports == ("shm", "gloo")
    assert opened.offered.served_at.startswith("unix:")
    memory.close()
