"""Handoffs in front of an engine: it goes on from those that hold, and never hears of the others."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from alignedserve.core.blocks import BlockAllocator
from alignedserve.core.ids import LeaseId, RequestId
from alignedserve.messages.iterations import Addition, IterationCompleted, RunIteration
from alignedserve.messages.links import ArenaOffered, BlockCopy, BlockRun, Handoff
from alignedserve.runtime.arena import Arena
from alignedserve.runtime.served_model import resolve_model
from alignedserve.runtime.transfer import Outgoing, ShmTransfer
from alignedserve.runtime.worker_engine import EngineSizes, WorkerEngine
from tests.desks.transfer import (
    NUM_POOL_BLOCKS,
    changed,
)
from tests.in_process import small_config
from tests.samples import blocks, request


class Engines:
    """Two workers and an arena: one computes, the other is to go on."""

    def __init__(self, folder: Path) -> None:
        config = small_config(folder / "model")
        served = resolve_model(config.model)
        layout = served.block_layout(config.engine.block_size)
        self.arena = Arena.create(folder / "pool.arena", layout, NUM_POOL_BLOCKS)
        self.here, self.there = (WorkerEngine(served, EngineSizes(1 << 18, 4, 8, 1)) for _ in range(2))
        offered = ArenaOffered(str(self.arena.path), NUM_POOL_BLOCKS, layout.block_bytes, layout.digest().hex())
        for engine in (self.here, self.there):
            engine.map_arena(offered)
        self.allocator = BlockAllocator(NUM_POOL_BLOCKS)

    def close(self) -> None:
        self.here.close()
        self.there.close()
        self.arena.close(unlink=True)

    @staticmethod
    async def run(engine: WorkerEngine, *additions: Addition, removals: tuple[RequestId, ...] = ()) -> Any:
        over: asyncio.Future[IterationCompleted] = asyncio.get_running_loop().create_future()
        slices = tuple((one.request.request_id, 1 if one.handoff else one.request.prompt_len) for one in additions)
        engine.start_iteration(RunIteration(removals, additions, (), slices), over.set_result)
        return await over

    async def prefilled(self) -> Handoff:
        of = request(prompt_len=19, max_tokens=4)
        (token,) = (await self.run(self.here, Addition(of, (), blocks(7, 2, 5)))).sampled
        taken = self.allocator.allocate(3)
        assert taken is not None
        self.arena.stamp(taken, 5)
        outgoing = Outgoing(blocks(7, 2, 5), taken, 5)
        (runs,) = ShmTransfer(self.here._storage, self.arena).offload([outgoing])
        assert runs is not None
        return Handoff(of, 1, (token.token_id,), LeaseId(5), BlockCopy(5, 19, runs))


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    made = Engines(tmp_path)
    yield made
    made.close()


async def test_an_engine_goes_on_from_a_handoff(engines: Engines) -> None:
    handoff = await engines.prefilled()
    of, tokens = handoff.request, handoff.generated_token_ids
    there: IterationCompleted = await engines.run(engines.there, Addition(of, tokens, blocks(1, 9, 4), handoff))
    over: asyncio.Future[IterationCompleted] = asyncio.get_running_loop().create_future()
    recomputed = Addition(of, tokens, blocks(8, 3, 6))
    command = RunIteration((of.request_id,), (recomputed,), (), ((of.request_id, 20),))
    engines.here.start_iteration(command, over.set_result)
    assert len(there.sampled) == 1
    assert there == await over


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": 4},
        {"context_len": 18},
        {"context_len": 20},
        {"context_len": 30},
        {"runs": ()},
        {"runs": (BlockRun(0, 3, 1),)},
        {"runs": (BlockRun(NUM_POOL_BLOCKS - 1, 3, 1),)},
    ],
    ids=str,
)
async def test_a_refused_request_never_enters_the_engine(engines: Engines, changes: dict[str, Any]) -> None:
    valid = await engines.prefilled()
    spoilt = msgspec.structs.replace(valid, copy=changed(valid.copy, **changes))
    addition = Addition(valid.request, valid.generated_token_ids, blocks(1, 9, 4), spoilt)
    over = await engines.run(engines.there, addition)
    assert over == IterationCompleted((), refused=(valid.request.request_id,))
    assert not engines.there._engine.has_sequence(valid.request.request_id)


async def test_another_requests_handoff_never_enters_the_engine(engines: Engines) -> None:
    valid = await engines.prefilled()
    other = msgspec.structs.replace(valid, request=request("r2", prompt_len=19))
    over = await engines.run(engines.there, Addition(valid.request, valid.generated_token_ids, blocks(1, 9, 4), other))
    assert over == IterationCompleted((), refused=(valid.request.request_id,))


async def test_a_refusal_leaves_its_companions_alone(engines: Engines) -> None:
    valid = await engines.prefilled()
    stale = msgspec.structs.replace(valid, copy=changed(valid.copy, generation=4))
    spoilt = Addition(valid.request, valid.generated_token_ids, blocks(1, 9, 4), stale)
    other = request("r2", prompt_len=5)
    over = await engines.run(engines.there, spoilt, Addition(other, (), blocks(10)))
    assert over.refused == (valid.request.request_id,)
    assert [token.request_id for token in over.sampled] == ["r2"]


async def test_without_an_arena_every_handoff_is_a_miss(engines: Engines) -> None:
    handoff = await engines.prefilled()
    engines.there.map_arena(ArenaOffered("/nowhere", 1, 1, ""))
    addition = Addition(handoff.request, handoff.generated_token_ids, blocks(1, 9, 4), handoff)
    assert (await engines.run(engines.there, addition)).refused == (handoff.request.request_id,)
