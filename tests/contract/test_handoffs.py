"""Handoffs in front of an engine: it goes on from those that hold, and never hears of the others."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from alignedserve.core.block_allocator import BlockAllocator
from alignedserve.core.ids import LeaseId
from alignedserve.messages.caches import ArenaOffered, BlockCopy, Handoff
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    Addition,
    BlocksLoaded,
    BlocksOffloaded,
    IterationCompleted,
    Load,
    LoadBlocks,
    OffloadBlocks,
    RunIteration,
)
from alignedserve.process.links import Identity
from alignedserve.runtime.engine.engine_sizes import EngineSizes
from alignedserve.runtime.engine.model_executor import ModelExecutor
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.model.served_model import resolve_model
from tests.harnesses.clusters.in_process import small_config
from tests.harnesses.transfer import NUM_POOL_BLOCKS, changed
from tests.support.samples import POOL, blocks, request

pytestmark = pytest.mark.slow


class Engines:
    """Two workers and an arena: one computes, the other is to go on."""

    def __init__(self, folder: Path) -> None:
        config = small_config(folder / "model")
        served = resolve_model(config.model)
        layout = served.block_layout(config.engine.block_size)
        self.arena = Arena.create(folder / "pool.arena", layout, NUM_POOL_BLOCKS)
        self.here, self.there = (ModelExecutor(served, EngineSizes(1 << 18, 4, 8, 1)) for _ in range(2))
        self.offered = ArenaOffered(str(self.arena.path), NUM_POOL_BLOCKS, layout.block_bytes, layout.digest().hex())
        identity = Identity(Role.DECODE_WORKER, "decode-0", b"t" * 32)
        self.copier_here, self.copier_there = self.here.copier(identity), self.there.copier(identity)
        self.allocator = BlockAllocator(NUM_POOL_BLOCKS)

    def close(self) -> None:
        self.here.close()
        self.there.close()
        self.arena.close(unlink=True)

    async def prefilled(self) -> Handoff:
        of = request(prompt_len=19, max_tokens=4)
        command = RunIteration((), (Addition(of, (), blocks(7, 2, 5)),), (), ((of.request_id, 19),))
        (token,) = self.here.run_iteration(command).sampled
        taken = self.allocator.allocate(3)
        assert taken is not None
        self.arena.stamp(taken, 5)
        self.copier_here.map_arena(POOL, self.offered, stamps=False)
        over: asyncio.Future[BlocksOffloaded] = asyncio.get_running_loop().create_future()
        offload = OffloadBlocks(of.request_id, 1, blocks(7, 2, 5), POOL, taken, 5, LeaseId(5))
        self.copier_here.start_offload(offload, over.set_result)
        runs = (await over).runs
        assert runs is not None
        return Handoff(of, 1, (token.token_id,), LeaseId(5), BlockCopy(5, 19, runs))

    async def load(self, *copies: tuple[Handoff, BlockCopy, tuple[int, ...]]) -> BlocksLoaded:
        over: asyncio.Future[BlocksLoaded] = asyncio.get_running_loop().create_future()
        parts = tuple(Load(of.request.request_id, copy, blocks(*numbers)) for of, copy, numbers in copies)
        self.copier_there.start_load(LoadBlocks(POOL, parts), over.set_result)
        return await over


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    made = Engines(tmp_path)
    yield made
    made.close()


async def test_an_engine_goes_on_from_a_handoff(engines: Engines) -> None:
    handoff = await engines.prefilled()
    engines.copier_there.map_arena(POOL, engines.offered, stamps=False)
    assert (await engines.load((handoff, handoff.copy, (1, 9, 4)))).refused == frozenset()
    of, tokens = handoff.request, handoff.generated_token_ids
    entering = Addition(of, tokens, blocks(1, 9, 4), 19)
    there = engines.there.run_iteration(RunIteration((), (entering,), (), ((of.request_id, 1),)))
    recomputed = Addition(of, tokens, blocks(8, 3, 6))
    command = RunIteration((of.request_id,), (recomputed,), (), ((of.request_id, 20),))
    alone: IterationCompleted = engines.here.run_iteration(command)
    assert len(there.sampled) == 1
    assert there == alone


async def test_a_refusal_leaves_its_companions_alone(engines: Engines) -> None:
    valid = await engines.prefilled()
    engines.copier_there.map_arena(POOL, engines.offered, stamps=False)
    other = msgspec.structs.replace(valid, request=request("r2", prompt_len=19))
    stale = changed(valid.copy, generation=4)
    assert (await engines.load((valid, stale, (1, 9, 4)), (other, valid.copy, (0, 2, 3)))).refused == {"r1"}


async def test_without_an_arena_every_handoff_is_a_miss(engines: Engines) -> None:
    handoff = await engines.prefilled()
    engines.copier_there.map_arena(POOL, ArenaOffered("/nowhere", 1, 1, ""), stamps=False)
    assert (await engines.load((handoff, handoff.copy, (1, 9, 4)))).refused == {"r1"}
