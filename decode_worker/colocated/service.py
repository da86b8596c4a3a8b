"""The colocated worker's process: its logic, its links and its engine, joined."""

from functools import partial

from alignedserve.messages.events import CommonEvent
from alignedserve.messages.iterations import RunIteration
from alignedserve.messages.links import DecodeWorkerInbound
from alignedserve.messages.wire import Codec
from alignedserve.process.logic_driver import LogicDriver
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.executor import Executor
from alignedserve.runtime.kv.candidate_memory import CandidateMemory, CopyCommand, LendingCopier
from alignedserve.runtime.kv.transfers.kv_transfer import AUTO
from alignedserve.worker_core.compute_meter import ComputeMeter
from alignedserve.worker_core.request_notes import Phases, WorkerNotes
from decode_worker.colocated.logic import ColocatedEvent, ColocatedLogic
from decode_worker.iteration_log_writer import try_write_iterations


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
        """`make`: makes its logic, out of what can be recorded. `memory`: to lend to others of its node, if requests
        move between them. `pool_at`: the pool of its node, if that keeps anything for it."""
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
        """Connect to the router; where it listens, others of its node connect to it."""
        if listen_at is not None:
            await self._driver.links.listen(listen_at)
        self._driver.links.dial(router_at)
        if self._pool_at is not None:
            self._driver.links.dial(self._pool_at)

    async def close(self) -> None:
        """Close the links, stop the threads, free what is lent and write the iteration log."""
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
