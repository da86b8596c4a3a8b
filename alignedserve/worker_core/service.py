"""The process of a worker: engine, memories, links and logic."""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from alignedserve.config.sections import (
    DecodeWorkerConfig,
    EngineConfig,
    PrefillWorkerConfig,
    PrefixCacheConfig,
    SchedulingConfig,
)
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.plugins import load_plugin
from alignedserve.messages.iterations import RelayBlocks, RunIteration
from alignedserve.messages.links import DecodeWorkerInbound, PrefillWorkerInbound
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
from alignedserve.runtime.engine.model_executor import shared_device_of
from alignedserve.runtime.executor import Executor, make_candidate_memory, make_executor
from alignedserve.runtime.kv.arena_files import arena_path
from alignedserve.runtime.kv.buffer_budget import BufferBudget
from alignedserve.runtime.kv.candidate_memory import CandidateMemory, LendingCopier
from alignedserve.runtime.kv.transfers.kv_transfer import AUTO
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.runtime.model.weights.shared_weights import share_weights
from alignedserve.scheduling.factory import with_yielding
from alignedserve.scheduling.policies import wants_shared_blocks
from alignedserve.scheduling.policy import DeviceMemory
from alignedserve.worker_core.compute_meter import ComputeMeter
from alignedserve.worker_core.factory import colocated_registration, make_colocated_logic, max_held, memory_of
from alignedserve.worker_core.handoff import Lending
from alignedserve.worker_core.iteration_log import IterationRecord
from alignedserve.worker_core.part import WorkCommand, WorkerEvent
from alignedserve.worker_core.request_notes import Phases, WorkerNotes
from alignedserve.worker_core.worker_logic import WorkerLogic

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


class Worker:
    """One worker of any kind, on one event loop."""

    def __init__(
        self,
        *,
        make: "partial[Any]",
        executor: Executor,
        process_spec: ProcessSpec,
        memory: CandidateMemory | None = None,
        pool_at: str | None = None,
        transport: str = AUTO,
    ) -> None:
        """`make`: makes the WorkerLogic. `memory`: lent to other workers. `pool_at`: the node's pool, if used."""
        logic: WorkerLogic[Any] = make()
        self._executor = executor
        self._log_path = process_spec.log_folder / f"{process_spec.name}.iterations.jsonl"
        self.iteration_log = logic.iteration_log
        self._copies: LendingCopier | None = None
        self._pool_at = pool_at
        if memory is not None or pool_at is not None:
            self._copies = LendingCopier(executor.copier(process_spec.identity(), transport=transport), memory)
        notes = None
        if process_spec.notes_requests:
            own_pool = pool_at if logic.phases is Phases.BOTH else None
            notes = WorkerNotes(logic.waiting, logic.phases, own_pool=own_pool)
        self._driver: LogicDriver[WorkerEvent, WorkCommand] = LogicDriver(
            logic,
            process_spec,
            Codec(PrefillWorkerInbound if logic.phases is Phases.PREFILL else DecodeWorkerInbound),
            self._perform,
            process_spec.recorder(make),
            executor.prepare,
            notes,
            meter=ComputeMeter(),
        )

    async def start(self, *, router_at: str, listen_at: str | None = None) -> None:
        """Connect to pool and router; with `listen_at`, let other workers connect."""
        if listen_at is not None:
            await self._driver.links.listen(listen_at)
        if self._pool_at is not None:
            self._driver.links.dial(self._pool_at)
        self._driver.links.dial(router_at)

    async def close(self) -> None:
        await self._driver.close()
        self._executor.close()
        if self._copies is not None:
            self._copies.close()
        if records := self.iteration_log.records():
            try:
                write_iterations(self._log_path, records)
            except OSError as error:
                logger.warning("the iteration log cannot be written to %s: %s", self._log_path, error.strerror)

    def _perform(self, command: WorkCommand) -> None:
        if isinstance(command, RunIteration):
            self._executor.start_iteration(command, self._driver.dispatch)
            return
        assert self._copies is not None, "a copy on a worker that shares no memory"
        if isinstance(command, RelayBlocks):
            lent_to = command.source if command.target == self._pool_at else command.target
            self._copies.start_relay(command, lent_to, self._driver.dispatch)
        else:
            self._copies.perform(command, self._driver.dispatch)


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The arguments of a worker's start, and values that follow from them for any kind."""

    config: DecodeWorkerConfig | PrefillWorkerConfig
    scheduling: SchedulingConfig
    engine: EngineConfig
    served: ServedModel
    process_spec: ProcessSpec

    @property
    def layout(self) -> BlockLayout:
        return self.served.block_layout(self.engine.block_size)

    @property
    def shared_device(self) -> SharedDevice | None:
        return shared_device_of(self.process_spec, self.engine)

    def sizes(self, max_sequences: int, **fields: Any) -> EngineSizes:
        """`fields`: others of EngineSizes."""
        return EngineSizes(
            self.config.kv_cache_bytes,
            max_sequences,
            self.engine.block_size,
            loads_quietly=self.process_spec.joins_others,
            max_tokens=self.config.max_num_batched_tokens,
            **fields,
        ).configured(self.engine)

    def arguments(self, executor: Executor, measured_s: float) -> dict[str, Any]:
        """Return the arguments of every logic but `registered`. `measured_s`: for which iterations are measured."""
        return {
            "config": self.config,
            "scheduling": self.scheduling,
            "eos_token_ids": executor.eos_token_ids,
            "measured": executor.measure_iterations(measured_s, self.config.max_num_batched_tokens),
        }

    def registered(self) -> dict[str, Any]:
        """Return fields of the registration of every worker."""
        spec = self.process_spec
        max_adapters = self.served.lora.max_worker_adapters
        return {"pool_name": spec.pool_name, "node": spec.addresses.node, "max_adapters": max_adapters}

    async def started(self, worker: Worker, *, listens: bool = False) -> Worker:
        spec = self.process_spec
        await worker.start(router_at=spec.router_name, listen_at=spec.name if listens else None)
        return worker


@dataclass(frozen=True, slots=True)
class DecodingStart(WorkerStart):
    """The start of a worker that decodes."""

    config: DecodeWorkerConfig

    @property
    def hidden_block_tokens(self) -> int | None:
        return hidden_block_tokens(self.served, self.scheduling, self.engine.block_size)

    def decoding_sizes(self, max_sequences: int, **fields: Any) -> EngineSizes:
        return self.sizes(
            max_sequences,
            has_int8_swaps=self.config.has_int8_swaps,
            hidden_block_tokens=self.hidden_block_tokens,
            swap_space_bytes=swapped_bytes(self.config.swap_space_bytes, self.scheduling),
            max_running=self.config.max_running_requests,
            **fields,
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


async def start_colocated_worker(
    config: DecodeWorkerConfig,
    scheduling: SchedulingConfig,
    engine_config: EngineConfig,
    served: ServedModel,
    lending: Lending | None,
    prefix_cache: PrefixCacheConfig,
    process_spec: ProcessSpec,
) -> Worker:
    """Start a worker that computes prompts and tokens. `lending`: None: requests do not move."""
    scheduling = with_yielding(scheduling, can_stop=can_stop(engine_config.device, served), decodes_here=True)
    start = DecodingStart(config, scheduling, engine_config, served, process_spec)
    stages = load_plugin("stages").far_stages(process_spec) if served.num_hosts > 1 else None
    can_move = lending is not None
    sizes = start.decoding_sizes(
        max_held(config),
        wants_shared_blocks=wants_shared_blocks(scheduling, can_move=can_move, has_int8_swaps=config.has_int8_swaps),
        lent_bytes=0 if lending is None else lending.buffer_bytes,
        stops_passes=bool(scheduling.yield_between_layers),
    )
    executor = make_executor(served, sizes, process_spec.progress_path(), start.shared_device, stages)
    start.share_weights()
    if served.encoder is not None:  # what a token's block holds depends on the tokens after it
        prefix_cache = PrefixCacheConfig(enabled=False)
    prefix_pool = process_spec.pool_name if prefix_cache.pool_bytes else None
    decode_pool = process_spec.pool_name if config.pool_bytes else None
    layout, fields = start.layout, start.registered()
    make = partial(
        make_colocated_logic,
        registered=colocated_registration(layout, executor.num_blocks, config, can_move=can_move, **fields),
        memory=start.memory(executor),
        prefix_cache=prefix_cache,
        prefix_pool=prefix_pool,
        decode_pool=decode_pool,
        num_layers=num_stops(layout, engine_config.device),
        has_states=layout.state_bytes > 0,
        may_draft=executor.may_draft,
        **start.arguments(executor, engine_config.calibration_s),
    )
    memory = None
    if lending is not None:
        budget = BufferBudget(layout.blocks_in(lending.buffer_bytes), lending.peers, may_grow=True)
        memory = make_candidate_memory(executor, budget, process_spec, engine_config)
    worker = Worker(
        make=make,
        executor=executor,
        process_spec=process_spec,
        memory=memory,
        pool_at=prefix_pool or decode_pool,
        transport=engine_config.kv_transport,
    )
    return await start.started(worker, listens=can_move)
