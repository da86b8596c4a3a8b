"""The path of the AlignedServe paper: a batch is prefetched into a prefill worker's device, and read from there.

Every worker has a device of its own, with a memory that nothing else touches, streams whose order is random, and links
that note what crosses them.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from alignedserve.config.sections import BatchingConfig, ClusterConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.messages.iterations import BlocksRelayed, LoadBlocks, OffloadBlocks, RelayBlocks
from alignedserve.process.process_spec import POOL
from alignedserve.runtime.kv.candidate_memory import BlockCopier
from tests.components.work import check, prompts, submitted
from tests.harnesses.client_gateway import Answer
from tests.harnesses.clusters.in_process import running, small_config
from tests.support.devices.device_stand_in import HOST, LINK, PCIE, Machine
from tests.support.waiting import holds

pytestmark = pytest.mark.slow

SAMPLING = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
PREFILL, DECODE = "prefill-0", "decode-0"
BLOCK_SIZE = 8
BLOCK_BYTES = 2 * 2 * BLOCK_SIZE * 2 * 8 * 4


def config_of(folder: Path, *, num_workers: int = 1) -> ClusterConfig:
    batching = BatchingConfig(min_requests=4, starvation_s=0.2)
    config = small_config(folder / "model", batching=batching)
    return replace(
        config,
        prefill=replace(config.prefill, count=num_workers),
        decode=replace(config.decode, count=num_workers),
        router=replace(config.router, max_retries=20),
    )


async def test_each_byte_crosses_pcie_once_each_way_and_the_link_once_as_early_as_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(seed=0)
    ordered = OrderedCopies(machine, monkeypatch)
    async with running(config_of(tmp_path), tmp_path, machine) as cluster:
        work = prompts(16)
        await check(cluster, work, await submitted(cluster, work, SAMPLING), SAMPLING)
    crossed = partial(num_blocks, machine)
    prefetched, returned = (sum(map(blocks_of, relays)) for relays in (ordered.prefetches, ordered.returns))
    assert prefetched == crossed(PCIE, HOST, PREFILL) > 0
    assert ordered.num_loaded[PREFILL] == crossed(LINK, PREFILL, DECODE) > 0
    assert ordered.num_loaded[POOL] == crossed(PCIE, HOST, DECODE)  # the first batch, for which nothing runs
    assert ordered.num_offloaded[POOL] + returned == crossed(PCIE, PREFILL, HOST)
    assert ordered.num_offloaded[PREFILL] == crossed(LINK, DECODE, PREFILL)
    copies = [(relay.request_id, relay.generation) for relay in ordered.prefetches]
    assert len(set(copies)) == len(copies)  # none is prefetched twice under one lease
    assert crossed(PCIE) + crossed(LINK) == sum((*ordered.num_loaded.values(), *ordered.num_offloaded.values())) + (
        prefetched + returned
    )
    # A stream for each thread that copies, however many copies there are.
    assert machine.device(PREFILL).num_streams <= 2
    assert machine.device(DECODE).num_streams <= 2
    # None waits while the way is free: each begins when it was ordered, or behind the one before it.
    for number, (given, begun) in enumerate(zip(ordered.given, ordered.begun, strict=True)):
        free = ordered.ended[number - 1] if number else 0
        between = [copy for copy in machine.moved(PCIE, HOST, PREFILL) if max(given, free) < copy.begun < begun]
        assert between == []
    # A request is asked for only when all of it lies in the buffer; others are there as they were evicted into it.
    for moment, loaded in ordered.loads:
        assert all(ordered.arrived.get(copy, 0) < moment for copy in loaded)


def num_blocks(machine: Machine, way: str, source: str | None = None, target: str | None = None) -> int:
    """Count the blocks that went this way."""
    return sum(copy.num_bytes for copy in machine.moved(way, source, target)) // BLOCK_BYTES


def blocks_of(relay: RelayBlocks) -> int:
    return len(relay.target_block_ids)


class OrderedCopies:
    """The copies that workers' logics order, and the moments of prefetches and of loads."""

    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prefetches: list[RelayBlocks] = []
        self.returns: list[RelayBlocks] = []
        self.given: list[int] = []  # of prefetches
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.arrived: dict[tuple[RequestId, int], int] = {}  # by request and generation
        self.loads: list[tuple[int, list[tuple[RequestId, int]]]] = []  # out of buffers
        self.num_loaded, self.num_offloaded = {POOL: 0, PREFILL: 0}, {POOL: 0, PREFILL: 0, DECODE: 0}  # blocks
        start_relay, relay = BlockCopier.start_relay, BlockCopier._relay
        start_load, start_offload = BlockCopier.start_load, BlockCopier.start_offload

        def relaying(copier: BlockCopier, command: RelayBlocks, peer: str, on_done: Any) -> None:
            (self.prefetches if command.source == POOL else self.returns).append(command)
            if command.source == POOL:
                self.given.append(machine.moment())
            start_relay(copier, command, peer, on_done)

        def relayed(copier: BlockCopier, command: RelayBlocks, peer: str) -> BlocksRelayed:
            if command.source != POOL:
                return relay(copier, command, peer)
            self.begun.append(machine.moment())
            done = relay(copier, command, peer)
            self.ended.append(machine.moment())
            self.arrived[command.request_id, command.generation] = self.ended[-1]
            return done

        def loading(copier: BlockCopier, command: LoadBlocks, on_done: Any) -> None:
            self.num_loaded[command.source] += sum(part.copy.num_blocks for part in command.loads)
            if command.source == PREFILL:
                copies = [(part.request_id, part.copy.generation) for part in command.loads]
                self.loads.append((machine.moment(), copies))
            start_load(copier, command, on_done)

        def offloading(copier: BlockCopier, command: OffloadBlocks, on_done: Any) -> None:
            self.num_offloaded[command.target] += len(command.block_ids)
            start_offload(copier, command, on_done)

        monkeypatch.setattr(BlockCopier, "start_relay", relaying)
        monkeypatch.setattr(BlockCopier, "_relay", relayed)
        monkeypatch.setattr(BlockCopier, "start_load", loading)
        monkeypatch.setattr(BlockCopier, "start_offload", offloading)


async def test_evicted_requests_go_over_the_link_and_come_back(tmp_path: Path) -> None:
    machine = Machine(seed=3)
    async with running(config_of(tmp_path), tmp_path, machine) as cluster:
        work, answers = list[list[int]](), list[Answer]()
        while not machine.moved(LINK, DECODE, PREFILL):
            assert len(work) < 200, "no batch has taken over from another"
            more = prompts(16)
            work += more
            answers += await submitted(cluster, more, SAMPLING)
            await answers[-1].done.wait()
        await check(cluster, work, answers, SAMPLING)
    assert all(copy.ended for copy in machine.moved(LINK))


@pytest.mark.parametrize("lost", [PREFILL, DECODE])
async def test_a_worker_is_lost_while_blocks_are_lent(lost: str, tmp_path: Path) -> None:
    machine = Machine()
    async with running(config_of(tmp_path, num_workers=2), tmp_path, machine) as cluster:
        work = prompts(24)
        answers = await submitted(cluster, work, SAMPLING, 8)
        await holds(lambda: len(machine.moved(LINK)) > 0)
        await cluster.stop(lost)
        await cluster.start_again(lost)
        await check(cluster, work, answers, SAMPLING)


async def test_cancelled_requests_leave_nothing_in_a_device(tmp_path: Path) -> None:
    machine = Machine()
    async with running(config_of(tmp_path), tmp_path, machine) as cluster:
        work = prompts(10)
        answers = await submitted(cluster, work, SAMPLING)
        await holds(lambda: len(machine.moved(PCIE, HOST, PREFILL)) > 0)
        for answer in answers[::2]:
            cluster.gateway.abort(answer)
        await check(cluster, work[1::2], answers[1::2], SAMPLING)


@pytest.mark.gpu
async def test_the_same_components_on_a_gpu(tmp_path: Path) -> None:
    """All in one process, whose own memory is not mapped but used."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    config = config_of(tmp_path)
    config = replace(config, engine=replace(config.engine, device="cuda:0"))
    async with running(config, tmp_path) as cluster:
        work = prompts(16)
        answers = await submitted(cluster, work, SAMPLING)
        await check(cluster, work, answers, SAMPLING)
