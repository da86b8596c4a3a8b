"""The prefill worker's process: its logic, its links, its engine and the candidate buffers in its memory, joined."""

from functools import partial

from alignedserve.messages.events import CommonEvent
from alignedserve.messages.iterations import RelayBlocks, RunIteration
from alignedserve.messages.links import PrefillWorkerInbound
from alignedserve.messages.wire import Codec
from alignedserve.process.logic_driver import LogicDriver
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.engine.model_executor import ModelExecutor
from alignedserve.runtime.kv.candidate_memory import CandidateMemory, LendingCopier
from alignedserve.worker_core.compute_meter import ComputeMeter
from alignedserve.worker_core.request_notes import Phases, WorkerNotes
from prefill_worker.logic import PrefillEvent, PrefillLogic, WorkCommand


class PrefillWorker:
    """One prefill worker on one event loop."""

    def __init__(
        self,
        *,
        make: "partial[PrefillLogic]",
        executor: ModelExecutor,
        memory: CandidateMemory,
        pool_name: str,
        process_spec: ProcessSpec,
    ) -> None:
        logic = make()
        self._executor = executor
        self._copies = LendingCopier(executor.copier(process_spec.identity()), memory)
        self._pool_name = pool_name
        self._driver: LogicDriver[CommonEvent | PrefillEvent, WorkCommand] = LogicDriver(
            logic,
            process_spec,
            Codec(PrefillWorkerInbound),
            self._perform,
            process_spec.recorder(make),
            executor.prepare,
            WorkerNotes(logic.waiting, Phases.PREFILL) if process_spec.notes_requests else None,
            meter=ComputeMeter(),
        )

    async def start(self, *, listen_at: str, router_at: str, pool_at: str) -> None:
        await self._driver.links.listen(listen_at)
        self._driver.links.dial(pool_at)
        self._driver.links.dial(router_at)

    async def close(self) -> None:
        await self._driver.close()
        self._executor.close()
        self._copies.close()

    def _perform(self, command: WorkCommand) -> None:
        match command:
            case RunIteration():
                self._executor.start_iteration(command, self._driver.dispatch)
            case RelayBlocks():
                self._copies.start_relay(command, self._buffer_of(command), self._driver.dispatch)
            case _:
                self._copies.perform(command, self._driver.dispatch)

    def _buffer_of(self, command: RelayBlocks) -> str:
        return command.source if command.target == self._pool_name else command.target
