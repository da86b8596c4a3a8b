"""Host memory that is registered with a driver: how it is cut, what a refusal leaves, and copies over the cuts."""

import logging
import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from alignedserve.runtime.device.cuda_driver import CudaDriver
from alignedserve.runtime.device.registered_memory import CHUNK_BYTES, RegisteredMemory
from alignedserve.runtime.kv.direct_copies import DirectCopies, HostSide
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.staged_copies import HostRows
from tests.harnesses.transfer import layout_of
from tests.support.devices.cpu_accelerator import CpuAccelerator
from tests.support.devices.device_stand_in import Machine
from tests.support.devices.memory_drivers import NotedDriver, StandInCuda
from tests.support.marks import each

PAGE = mmap.PAGESIZE
LAYOUT = layout_of("float32")
ROWS_PER_PAGE, NUM_BLOCKS = PAGE // LAYOUT.block_bytes, 24


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandInCuda:
    """A driver that refuses to register anything."""
    cuda = StandInCuda(largest=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda.cudart)
    return cuda


# --- cuts


def test_chunks_are_cut_between_blocks_and_between_pages() -> None:
    driver, block_bytes = NotedDriver(largest=10 * PAGE), 3 * PAGE // 4
    memory = RegisteredMemory(driver, 8 * PAGE, block_bytes, 20, head_bytes=PAGE, chunk_bytes=9 * PAGE)
    assert memory.obstacle is None
    assert memory.rows_per_chunk == 12
    assert driver.registered == {8 * PAGE: 10 * PAGE, 18 * PAGE: 6 * PAGE}
    memory.close()
    memory.close()
    assert driver.registered == {}


def test_memory_is_registered_as_a_whole_or_not_at_all() -> None:
    driver = NotedDriver(num_allowed=2)
    memory = RegisteredMemory(driver, 8 * PAGE, PAGE, 3, chunk_bytes=PAGE)
    assert memory.obstacle == "out of memory"
    assert driver.registered == {}
    assert driver.calls[-2:] == [("unregister", 9 * PAGE), ("unregister", 8 * PAGE)]


@each("block_bytes", [2 << 20, 80 << 10, 1000 * 264])
def test_a_pool_of_700_gib_is_taken_by_drivers_that_refuse_512_at_once(block_bytes: int) -> None:
    cuda, num_blocks = StandInCuda(), (700 << 30) // block_bytes
    memory = RegisteredMemory(CudaDriver(0, cuda.library), 1 << 40, block_bytes, num_blocks, head_bytes=PAGE)
    assert memory.obstacle is None
    assert sum(cuda.registered.values()) == PAGE + num_blocks * block_bytes
    assert len(cuda.registered) == -(-num_blocks * block_bytes // CHUNK_BYTES)
    first, *others = cuda.registered
    assert all((address - first - PAGE) % block_bytes == 0 and address % PAGE == 0 for address in others)
    memory.close()
    assert not cuda.registered


@each("is_straight", [True, False])
def test_no_copy_reaches_over_two_registrations_of_an_arena(tmp_path: Path, *, is_straight: bool) -> None:
    """CUDA calls such a copy an invalid argument; the stand-in refuses it too."""
    device = Machine().device("one")
    device.use()
    arena = Arena.create(tmp_path / "pool.arena", LAYOUT, NUM_BLOCKS)
    arena.register(device.driver, chunk_bytes=2 * PAGE)
    assert arena.rows_per_registration == 2 * ROWS_PER_PAGE
    rng = np.random.default_rng(1)
    plain = torch.from_numpy(rng.integers(0, 256, (NUM_BLOCKS, LAYOUT.block_bytes), np.uint8))
    before, own = plain.clone(), device.adopt(plain)
    copies = DirectCopies(device, least_straight_bytes=0 if is_straight else 1 << 20)
    order = np.concatenate([np.arange(3, NUM_BLOCKS), np.arange(3)])  # neighbours, over every cut
    there = HostSide(arena.listed(order), arena.rows_per_registration)
    digests = copies.copy_out(own, order, there)
    assert (arena.blocks == before.numpy()).all()
    plain.zero_()
    assert (copies.copy_in(there, own, order) == digests).all()
    assert torch.equal(plain, before)
    arena.close(unlink=True)


def test_rows_of_swapped_caches_are_pieces_of_one_registration_each() -> None:
    rows = HostRows(CpuAccelerator(), LAYOUT.block_bytes, NUM_BLOCKS, chunk_bytes=PAGE)
    pieces = rows.pieces(np.arange(2, 2 + 2 * ROWS_PER_PAGE))
    assert [len(piece) for piece in pieces] == [ROWS_PER_PAGE - 2, ROWS_PER_PAGE, 2]


# --- refusals


def test_a_refusal_is_said_and_leaves_no_error_for_the_next_kernel(
    cuda: StandInCuda, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch raises the runtime's last error at the next launch, which ended the worker, again and again."""
    accelerator = CpuAccelerator(driver=CudaDriver(0, cuda.library))
    rows = HostRows(accelerator, LAYOUT.block_bytes, NUM_BLOCKS)
    cuda.launch()
    assert rows.pieces(np.arange(0)) == []
    assert "swapped caches are in memory of their own: out of memory" in caplog.text
    assert cuda.num_retained == 0


def test_the_runtime_s_refusal_would_be_raised_by_the_next_kernel(cuda: StandInCuda) -> None:
    """So that the test above can fail."""
    assert cuda.cudart.cudaHostRegister(PAGE, PAGE, 1) == StandInCuda.OUT_OF_MEMORY
    with pytest.raises(torch.AcceleratorError, match="out of memory"):
        cuda.launch()


@each("device", [0, 1])
def test_a_driver_without_the_gpu_or_its_library_says_so(device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CudaDriver(1, StandInCuda().library)
    if device == 0:
        monkeypatch.setattr("alignedserve.runtime.device.cuda_driver._LIBRARY", "libcuda-that-is-not-there.so")
        driver = CudaDriver(0)
    assert (driver.register(PAGE, PAGE) or "").startswith(("error 101", "libcuda-that-is-not-there.so"))


def test_memory_that_stays_registered_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        CudaDriver(0, StandInCuda().library).unregister(PAGE)
    assert "memory stays registered: error 713" in caplog.text
