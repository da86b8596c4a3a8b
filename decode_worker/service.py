"""Starts a worker in its own process: its engine and memories, then its logic and links."""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from alignedserve.config.sections import (
    BatchingConfig,
    DecodeWorkerConfig,
    EngineConfig,
    PrefixCacheConfig,
    SchedulingConfig,
)
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.plugins import load_plugin
from alignedserve.messages.events import CommonEvent
from alignedserve.messages.iterations import LoadBlocks, MapArena, OffloadBlocks, RunIteration, UnmapArena
from alignedserve.messages.links import DecodeWorkerInbound
from alignedserve.messages.wire import Codec
from alignedserve.process.logic_driver import LogicDriver
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.device.shared_device import SharedDevice
from alignedserve.runtime.engine.engine_sizes import (
    EngineSizes,
    can_stop,
    hidden_block_tokens,
    num_stops,
    swapped_bytes,
)
from alignedserve.runtime.engine.model_executor import ModelExecutor, shared_device_of
from alignedserve.runtime.executor import Executor, make_candidate_memory, make_executor
from alignedserve.runtime.kv.arena_files import arena_path
from alignedserve.runtime.kv.buffer_budget import BufferBudget
from alignedserve.runtime.kv.candidate_memory import BlockCopier, CandidateMemory, CopyCommand, LendingCopier
from alignedserve.runtime.kv.transfers.kv_transfer import AUTO
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.runtime.model.weights.shared_weights import share_weights
from alignedserve.scheduling.factory import calibration_s, with_yielding
from alignedserve.scheduling.policies import wants_shared_blocks
from alignedserve.scheduling.policy import DeviceMemory
from alignedserve.worker_core.compute_meter import ComputeMeter
from alignedserve.worker_core.iteration_log import IterationRecord
from alignedserve.worker_core.request_notes import Phases, WorkerNotes
from alignedserve.worker_core.router_link import num_active, registration_of
from decode_worker.colocated.logic import ColocatedEvent, ColocatedLogic
from decode_worker.factory import (
    colocated_registration,
    engine_places,
    make_colocated_logic,
    make_logic,
    max_held,
    memory_of,
)
from decode_worker.logic import DecodeEvent, DecodeLogic, WorkCommand
from decode_worker.state import Lending

logger = logging.getLogger(__name__)

_DECIMALS = 7  # a tenth of a microsecond


def write_iterations(path: Path, records: Sequence[IterationRecord]) -> None:
    """Write one JSON object per line, oldest first. An earlier file is replaced atomically. Raises OSError."""
    clock_to_date_s = time.time() - time.monotonic()
    lines = [orjson.dumps(_columns_of(record, clock_to_date_s)) + b"\n" for record in records]
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        unfinished.write_bytes(b"".join(lines))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _columns_of(record: IterationRecord, clock_to_date_s: float) -> dict[str, Any]:
    columns = {
        name: round(value, _DECIMALS) if isinstance(value, float) else value for name, value in record._asdict().items()
    }
    return {"started_at": datetime.fromtimestamp(record.started_s + clock_to_date_s, UTC).isoformat(), **columns}


def try_write_iterations(path: Path, records: Sequence[IterationRecord]) -> None:
    if not records:
        return
    try:
        write_iterations(path, records)
    except OSError as error:
        logger.warning("the iteration log cannot be written to %s: %s", path, error.strerror)


class DecodeWorker:
    """One decode worker on one event loop."""

    def __init__(
        self, *, make: "partial[DecodeLogic]", executor: ModelExecutor, process_spec: ProcessSpec, transport: str = AUTO
    ) -> None:
        logic = make()
        self._executor = executor
        self._iteration_log_path = process_spec.log_folder / f"{process_spec.name}.iterations.jsonl"
        self._copier: BlockCopier = executor.copier(process_spec.identity(), transport=transport)
        self.iteration_log = logic.iteration_log
        self._driver: LogicDriver[CommonEvent | DecodeEvent, WorkCommand] = LogicDriver(
            logic,
            process_spec,
            Codec(DecodeWorkerInbound),
            self._perform,
            process_spec.recorder(make),
            executor.prepare,
            WorkerNotes(logic.waiting, Phases.DECODE) if process_spec.notes_requests else None,
            meter=ComputeMeter(),
        )

    async def start(self, *, router_at: str, pool_at: str) -> None:
        self._driver.links.dial(pool_at)
        self._driver.links.dial(router_at)

    async def close(self) -> None:
        await self._driver.close()
        self._executor.close()
        self._copier.close()
        try_write_iterations(self._iteration_log_path, self.iteration_log.records())

    def _perform(self, command: WorkCommand) -> None:
        match command:
            case RunIteration():
                self._executor.start_iteration(command, self._driver.dispatch)
            case LoadBlocks():
                self._copier.start_load(command, self._driver.dispatch)
            case OffloadBlocks():
                self._copier.start_offload(command, self._driver.dispatch)
            case MapArena(peer, offered, stamps):
                self._copier.map_arena(peer, offered, stamps=stamps)
            case UnmapArena(peer):
                self._copier.unmap_arena(peer)


class ColocatedWorker:
    """One worker for both phases on one event loop."""

    def __init__(
        self,
        *,
        make: "partial[ColocatedLogic]",
        executor: Executor,
        process_spec: ProcessSpec,
        memory: CandidateMemory | None = None,
        pool_at: str | None = None,
        transport: str = AUTO,
    ) -> None:
        """`make`: makes its logic. `memory`: to lend to others of its node. `pool_at`: the pool of its node, if it
        keeps any."""
        logic = make()
        self._executor = executor
        self._iteration_log_path = process_spec.log_folder / f"{process_spec.name}.iterations.jsonl"
        self.iteration_log = logic.iteration_log
        self._copies: LendingCopier | None = None
        self._pool_at = pool_at
        if memory is not None or pool_at is not None:
            self._copies = LendingCopier(executor.copier(process_spec.identity(), transport=transport), memory)
        self._driver: LogicDriver[CommonEvent | ColocatedEvent, RunIteration | CopyCommand] = LogicDriver(
            logic,
            process_spec,
            Codec(DecodeWorkerInbound),
            self._perform,
            process_spec.recorder(make),
            executor.prepare,
            WorkerNotes(logic.waiting, Phases.BOTH, own_pool=pool_at) if process_spec.notes_requests else None,
            meter=ComputeMeter(),
        )

    async def start(self, *, router_at: str, listen_at: str | None = None) -> None:
        """Connect to the router; with `listen_at`, let other workers of the node connect."""
        if listen_at is not None:
            await self._driver.links.listen(listen_at)
        self._driver.links.dial(router_at)
        if self._pool_at is not None:
            self._driver.links.dial(self._pool_at)

    async def close(self) -> None:
        await self._driver.close()
        self._executor.close()
        if self._copies is not None:
            self._copies.close()
        try_write_iterations(self._iteration_log_path, self.iteration_log.records())

    def _perform(self, command: RunIteration | CopyCommand) -> None:
        if isinstance(command, RunIteration):
            self._executor.start_iteration(command, self._driver.dispatch)
            return
        assert self._copies is not None, "a copy on a worker that shares no memory"
        self._copies.perform(command, self._driver.dispatch)


@dataclass(frozen=True, slots=True)
class _Start:
    config: DecodeWorkerConfig
    scheduling: SchedulingConfig
    engine: EngineConfig
    served: ServedModel
    process_spec: ProcessSpec

    @property
    def layout(self) -> BlockLayout:
        return self.served.block_layout(self.engine.block_size)

    @property
    def hidden_block_tokens(self) -> int | None:
        return hidden_block_tokens(self.served, self.scheduling, self.engine.block_size)

    @property
    def shared_device(self) -> SharedDevice | None:
        return shared_device_of(self.process_spec, self.engine)

    def sizes(self, max_sequences: int) -> EngineSizes:
        return EngineSizes(
            self.config.kv_cache_bytes,
            max_sequences,
            self.engine.block_size,
            has_int8_swaps=self.config.has_int8_swaps,
            hidden_block_tokens=self.hidden_block_tokens,
            loads_quietly=self.process_spec.joins_others,
            swap_space_bytes=swapped_bytes(self.config.swap_space_bytes, self.scheduling),
            max_running=self.config.max_running_requests,
            max_tokens=self.config.max_num_batched_tokens,
        )

    def share_weights(self) -> None:
        if self.config.standby:
            path = arena_path(self.process_spec.cluster_id, f"{self.process_spec.pool_name}-weights")
            share_weights(path, self.process_spec.addresses.folder)

    def memory(self, executor: Executor) -> DeviceMemory:
        return memory_of(
            self.config,
            self.layout,
            num_blocks=executor.num_blocks,
            hidden_block_tokens=self.hidden_block_tokens,
            has_shared_blocks=executor.has_shared_blocks,
        )


async def start_decode_worker(
    config: DecodeWorkerConfig,
    batching: BatchingConfig,
    scheduling: SchedulingConfig,
    engine_config: EngineConfig,
    served: ServedModel,
    process_spec: ProcessSpec,
) -> DecodeWorker:
    start = _Start(config, scheduling, engine_config, served, process_spec)
    sizes = start.sizes(engine_places(config, scheduling)).configured(engine_config)
    executor = ModelExecutor(served, sizes, process_spec.progress_path(), start.shared_device)
    start.share_weights()
    pool_name = process_spec.pool_name
    registered = registration_of(
        start.layout,
        executor.num_blocks,
        config.max_running_requests,
        pool_name,
        node=process_spec.addresses.node,
        can_decode=True,
        max_adapters=served.lora.max_worker_adapters,
        num_active=num_active(config),
    )
    calibrating_s = calibration_s(engine_config, scheduling, batching)
    make = partial(
        make_logic,
        registered=registered,
        config=config,
        batching=batching,
        scheduling=scheduling,
        memory=start.memory(executor),
        eos_token_ids=executor.eos_token_ids,
        measured=executor.measure_iterations(calibrating_s, config.max_num_batched_tokens),
    )
    worker = DecodeWorker(make=make, executor=executor, process_spec=process_spec, transport=engine_config.kv_transport)
    await worker.start(router_at=process_spec.router_name, pool_at=pool_name)
    return worker


async def start_colocated_worker(
    config: DecodeWorkerConfig,
    scheduling: SchedulingConfig,
    engine_config: EngineConfig,
    served: ServedModel,
    lending: Lending | None,
    prefix_cache: PrefixCacheConfig,
    process_spec: ProcessSpec,
) -> ColocatedWorker:
    """Start a worker that computes prompts and tokens. `lending`: None: requests do not move."""
    scheduling = with_yielding(scheduling, can_stop=can_stop(engine_config.device, served), decodes_here=True)
    start = _Start(config, scheduling, engine_config, served, process_spec)
    stages = load_plugin("stages").far_stages(process_spec) if served.num_hosts > 1 else None
    sizes = _colocated_sizes(start, lending)
    executor = make_executor(served, sizes, process_spec.progress_path(), start.shared_device, stages)
    start.share_weights()
    if served.encoder is not None:  # what a token's block holds depends on the tokens after it
        prefix_cache = PrefixCacheConfig(enabled=False)
    prefix_pool = process_spec.pool_name if prefix_cache.pool_bytes else None
    decode_pool = process_spec.pool_name if config.pool_bytes else None
    make = partial(
        make_colocated_logic,
        registered=colocated_registration(
            start.layout,
            executor.num_blocks,
            config,
            pool_name=process_spec.pool_name,
            can_move=lending is not None,
            node=process_spec.addresses.node,
            max_adapters=served.lora.max_worker_adapters,
        ),
        memory=start.memory(executor),
        config=config,
        scheduling=scheduling,
        eos_token_ids=executor.eos_token_ids,
        measured=executor.measure_iterations(engine_config.calibration_s, config.max_num_batched_tokens),
        prefix_cache=prefix_cache,
        prefix_pool=prefix_pool,
        decode_pool=decode_pool,
        num_layers=num_stops(start.layout, engine_config.device),
        has_states=start.layout.state_bytes > 0,
    )
    worker = ColocatedWorker(
        make=make,
        executor=executor,
        process_spec=process_spec,
        memory=None if lending is None else _lent_memory(start, lending, executor),
        pool_at=prefix_pool or decode_pool,
        transport=engine_config.kv_transport,
    )
    await worker.start(router_at=process_spec.router_name, listen_at=process_spec.name if lending is not None else None)
    return worker


def _colocated_sizes(start: _Start, lending: Lending | None) -> EngineSizes:
    has_int8_swaps = start.config.has_int8_swaps
    return replace(
        start.sizes(max_held(start.config)),
        wants_shared_blocks=wants_shared_blocks(
            start.scheduling, can_move=lending is not None, has_int8_swaps=has_int8_swaps
        ),
        lent_bytes=0 if lending is None else lending.buffer_bytes,
        stops_passes=bool(start.scheduling.yield_between_layers),
    ).configured(start.engine)


def _lent_memory(start: _Start, lending: Lending, executor: Executor) -> CandidateMemory:
    budget = BufferBudget(start.layout.blocks_in(lending.buffer_bytes), lending.peers, may_grow=True)
    return make_candidate_memory(executor, budget, start.process_spec, start.engine)
