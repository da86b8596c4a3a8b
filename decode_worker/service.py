"""The decode worker's process: its logic, its links and its engine, joined."""

from functools import partial

from alignedserve.messages.events import CommonEvent
from alignedserve.messages.iterations import LoadBlocks, MapArena, OffloadBlocks, RunIteration, UnmapArena
from alignedserve.messages.links import DecodeWorkerInbound
from alignedserve.messages.wire import Codec
from alignedserve.process.logic_driver import LogicDriver
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.engine.model_executor import ModelExecutor
from alignedserve.runtime.kv.block_copier import BlockCopier
from alignedserve.runtime.kv.transfers.kv_transfer import AUTO
from alignedserve.worker_core.compute_meter import ComputeMeter
from alignedserve.worker_core.request_notes import Phases, WorkerNotes
from decode_worker.iteration_log_writer import try_write_iterations
from decode_worker.logic import DecodeEvent, DecodeLogic, WorkCommand


class DecodeWorker:
    """One decode worker on one event loop."""

    def __init__(
        self,
        *,
        make: "partial[DecodeLogic]",
        executor: ModelExecutor,
        process_spec: ProcessSpec,
        transport: str = AUTO,
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
