"""The prefill worker at work: its logic, its links and its engine, joined."""

from alignedserve.config.sections import PrefillWorkerConfig
from alignedserve.messages.events import CommonEvent
from alignedserve.messages.iterations import IterationCompleted, MapArena, OffloadBlocks, RunIteration
from alignedserve.messages.links import PrefillWorkerInbound, WorkerRegistered
from alignedserve.messages.wire import Codec
from alignedserve.runtime.links import Identity
from alignedserve.runtime.room import Room
from alignedserve.runtime.worker_engine import WorkerEngine
from prefill_worker.logic import OffloadCompleted, PrefillLimits, PrefillLogic


class PrefillWorker:
    """One prefill worker on one event loop."""

    def __init__(
        self, *, config: PrefillWorkerConfig, engine: WorkerEngine, registered: WorkerRegistered, identity: Identity
    ) -> None:
        self._engine = engine
        logic = PrefillLogic(
            registered=registered,
            limits=PrefillLimits(config.max_tokens_per_iteration, config.max_running),
            eos_token_ids=engine.eos_token_ids,
        )
        self._room: Room[
            CommonEvent | IterationCompleted | OffloadCompleted, RunIteration | OffloadBlocks | MapArena
        ] = Room(logic, identity, Codec(PrefillWorkerInbound), self._perform)

    async def start(self, *, router_at: str, pool_at: str) -> None:
        """Introduce ourselves to router and pool."""
        self._room.switchboard.dial(pool_at)
        self._room.switchboard.dial(router_at)

    async def close(self) -> None:
        """Drop the links and end the threads."""
        await self._room.close()
        self._engine.close()

    def _perform(self, command: RunIteration | OffloadBlocks | MapArena) -> None:
        match command:
            case RunIteration():
                self._engine.start_iteration(command, self._room.dispatch)
            case OffloadBlocks():
                self._offload(command)
            case MapArena(offered):
                self._engine.map_arena(offered)

    def _offload(self, command: OffloadBlocks) -> None:
        self._engine.start_offload(
            command,
            lambda runs: self._room.dispatch(OffloadCompleted(command.request_id, command.reserved, runs)),
        )
