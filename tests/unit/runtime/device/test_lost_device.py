"""A GPU that fails in a step: its worker ends by an error that names it, other errors are as they were."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typing_extensions import override

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import DeviceLost, PeerLost
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.messages.caches import ArenaOffered
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import BlocksOffloaded, OffloadBlocks, RunIteration
from alignedserve.process.links import Identity
from alignedserve.process.worker_threads import WorkerThreads
from alignedserve.runtime.device.accelerator import copying, working
from alignedserve.runtime.engine.engine import Engine
from alignedserve.runtime.engine.engine_sizes import EngineSizes
from alignedserve.runtime.engine.model_executor import ModelExecutor
from alignedserve.runtime.kv.block_runs import BlockIds
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.candidate_memory import BlockCopier
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.model.served_model import resolve_model
from kernels.cpu.block_copies import BlockList

GPU = torch.device("cuda:1")
FALLEN = "CUDA error: GPU has fallen off the bus\nCUDA kernel errors might be asynchronously reported"


REFUSED = "CUDA error: invalid argument\nSearch for `cudaErrorInvalidValue' in CUDA's documentation"


def fail(*_: object, **__: object) -> None:
    raise torch.AcceleratorError(FALLEN, 0)


def test_the_error_names_the_gpu_and_the_reason_in_one_line() -> None:
    with pytest.raises(DeviceLost) as caught, working(GPU):
        fail()
    assert str(caught.value) == (
        "cuda:1 stopped working (CUDA error: GPU has fallen off the bus); this worker ends, and its requests go on "
        "elsewhere"
    )
    assert not isinstance(caught.value, OSError)  # which a process survives


@pytest.mark.parametrize("error", [RuntimeError("of ours"), torch.cuda.OutOfMemoryError("CUDA out of memory")])
def test_other_errors_are_not_the_devices(error: Exception) -> None:
    with pytest.raises(type(error)), working(GPU):
        raise error


def test_a_call_that_is_refused_for_its_arguments_is_no_lost_device() -> None:
    by_text, by_code = torch.AcceleratorError(REFUSED), torch.AcceleratorError("of another wording")
    by_code.error_code = 1  # type: ignore[attr-defined]
    for error in (by_text, by_code):
        with pytest.raises(torch.AcceleratorError), working(GPU):
            raise error
    with pytest.raises(PeerLost, match=r"cuda:1 refuses a copy: CUDA error: invalid argument$"), copying(GPU):
        raise by_text
    with pytest.raises(DeviceLost), copying(GPU):
        fail()


def test_a_step_on_a_device_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = ModelExecutor(resolve_model(ModelSectionConfig()), EngineSizes(1 << 20, 2, 16, 1))
    monkeypatch.setattr(Engine, "execute", fail)
    with pytest.raises(DeviceLost, match="cpu stopped working"):
        executor.run_iteration(RunIteration(slices=((RequestId("a"), 1),), removals=(), additions=(), extensions=()))
    executor.close()


async def test_a_copy_that_the_device_refuses_is_refused_alone(tmp_path: Path) -> None:
    layout = BlockLayout(1, 8, 1, 8, "float32")
    threads, identity = WorkerThreads(), Identity(Role.DECODE_WORKER, "worker", b"secret")
    copier = BlockCopier(RefusingStorage(layout, 4), threads, identity)
    Arena.create(tmp_path / "arena", layout, 4).stamp([BlockId(0)], 1)
    copier.map_arena("pool", offer_of(tmp_path / "arena", layout), stamps=False)
    over: asyncio.Future[BlocksOffloaded] = asyncio.get_running_loop().create_future()
    copier.start_offload(OffloadBlocks(RequestId("a"), 0, (BlockId(0),), "pool", (BlockId(0),), 1), over.set_result)
    async with asyncio.timeout(60):
        assert (await over).runs is None
    threads.close()
    copier.close()


async def test_a_copy_on_a_device_that_fails_is_its_worker_s_end(tmp_path: Path) -> None:
    faults: asyncio.Queue[BaseException] = asyncio.Queue()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.put_nowait(context["exception"]))
    layout = BlockLayout(1, 8, 1, 8, "float32")
    threads, identity = WorkerThreads(), Identity(Role.DECODE_WORKER, "worker", b"secret")
    copier = BlockCopier(FallenStorage(layout, 4), threads, identity)
    Arena.create(tmp_path / "arena", layout, 4).stamp([BlockId(0)], 1)
    copier.map_arena("pool", offer_of(tmp_path / "arena", layout), stamps=False)
    copier.start_offload(
        OffloadBlocks(RequestId("a"), 0, (BlockId(0),), "pool", (BlockId(0),), 1), lambda done: pytest.fail(str(done))
    )
    async with asyncio.timeout(60):
        assert isinstance(await faults.get(), DeviceLost)
    threads.close()
    copier.close()


class RefusingStorage(BlockStorage):
    """Blocks on a device that refuses a copy of them."""

    @override
    def pieces_to_read(self, block_ids: BlockIds) -> Iterator[BlockList]:
        raise torch.AcceleratorError(REFUSED)


class FallenStorage(BlockStorage):
    """Blocks on a device that has failed."""

    @override
    def pieces_to_read(self, block_ids: BlockIds) -> Iterator[BlockList]:
        fail()
        return super().pieces_to_read(block_ids)


def offer_of(path: Path, layout: BlockLayout) -> ArenaOffered:
    return ArenaOffered(str(path), 4, layout.block_bytes, layout.digest().hex())
