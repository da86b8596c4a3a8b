"""The decode worker at work: its logic, its links and its engine, joined."""

import logging
from pathlib import Path

from alignedserve.config.sections import DecodeWorkerConfig
from alignedserve.messages.events import CommonEvent
from alignedserve.messages.iterations import IterationCompleted, MapArena, RunIteration
from alignedserve.messages.links import DecodeWorkerInbound, WorkerRegistered
from alignedserve.messages.wire import Codec
from alignedserve.runtime.links import Identity
from alignedserve.runtime.room import Room
from alignedserve.runtime.worker_engine import WorkerEngine
from decode_worker.ledger_file import write_ledger
from decode_worker.logic import DecodeLimits, DecodeLogic

logger = logging.getLogger(__name__)


class DecodeWorker:
    """One decode worker (colocated: one worker for both phases) on one event loop."""

    def __init__(
        self,
        *,
        config: DecodeWorkerConfig,
        engine: WorkerEngine,
        registered: WorkerRegistered,
        identity: Identity,
        ledger_path: Path | None = None,
    ) -> None:
        """`ledger_path`: where `close` leaves the latest iterations; None: nowhere."""
        self._engine = engine
        self._ledger_path = ledger_path
        logic = DecodeLogic(
            registered=registered,
            limits=DecodeLimits(config.max_running, config.max_tokens_per_iteration),
            eos_token_ids=engine.eos_token_ids,
        )
        self.ledger = logic.ledger
        self._room: Room[CommonEvent | IterationCompleted, RunIteration | MapArena] = Room(
            logic, identity, Codec(DecodeWorkerInbound), self._perform
        )

    async def start(self, *, router_at: str, pool_at: str | None) -> None:
        """Introduce ourselves to the router and, unless colocated, to the pool."""
        if pool_at is not None:
            self._room.switchboard.dial(pool_at)
        self._room.switchboard.dial(router_at)

    async def close(self) -> None:
        """Drop the links, end the threads and leave the ledger behind."""
        await self._room.close()
        self._engine.close()
        records = self.ledger.records()
        if self._ledger_path is None or not records:
            return
        try:
            write_ledger(self._ledger_path, records)
        except OSError as error:
            logger.warning("the ledger cannot be written to %s: %s", self._ledger_path, error.strerror)

    def _perform(self, command: RunIteration | MapArena) -> None:
        match command:
            case RunIteration():
                self._engine.start_iteration(command, self._room.dispatch)
            case MapArena(offered):
                self._engine.map_arena(offered)
