"""The colocated worker's process: its logic, its link to the router and its engine, joined."""

from functools import partial

from alignedserve.messages.iterations import RunIteration
from alignedserve.messages.links import DecodeWorkerInbound
from alignedserve.messages.wire import Codec
from alignedserve.runtime.engine.model_executor import ModelExecutor
from alignedserve.runtime.process.logic_driver import LogicDriver
from alignedserve.runtime.process.process_spec import ProcessSpec
from decode_worker.colocated.logic import ColocatedEvent, ColocatedLogic
from decode_worker.iteration_log_writer import try_write_iterations


class ColocatedWorker:
    """One worker for both phases on one event loop."""

    def __init__(self, *, make: "partial[ColocatedLogic]", executor: ModelExecutor, process_spec: ProcessSpec) -> None:
        """`make`: makes its logic, out of what can be recorded."""
        logic = make()
        self._executor = executor
        self._iteration_log_path = process_spec.log_folder / f"{process_spec.name}.iterations.jsonl"
        self.iteration_log = logic.iteration_log
        self._driver: LogicDriver[ColocatedEvent, RunIteration] = LogicDriver(
            logic, process_spec, Codec(DecodeWorkerInbound), self._perform, process_spec.recorder(make)
        )

    async def start(self, *, router_at: str) -> None:
        """Connect to the router."""
        self._driver.links.dial(router_at)

    async def close(self) -> None:
        """Close the link, stop the threads and write the iteration log."""
        await self._driver.close()
        self._executor.close()
        try_write_iterations(self._iteration_log_path, self.iteration_log.records())

    def _perform(self, command: RunIteration) -> None:
        self._executor.start_iteration(command, self._driver.dispatch)
