"""The decode worker at work: its logic, its links and its engine, joined."""

import logging
from collections.abc import Sequence

from alignedserve.config.sections import BatchingConfig, DecodeWorkerConfig
from alignedserve.messages.events import CommonEvent
from alignedserve.messages.iterations import LoadBlocks, MapArena, OffloadBlocks, RunIteration, UnmapArena
from alignedserve.messages.links import DecodeWorkerInbound, WorkerRegistered
from alignedserve.messages.wire import Codec
from alignedserve.runtime.block_copier import BlockCopier
from alignedserve.runtime.membership import Membership
from alignedserve.runtime.room import Room
from alignedserve.runtime.transport import AUTO
from alignedserve.runtime.worker_engine import WorkerEngine
from decode_worker.batches import SwitchLimits
from decode_worker.ledger_file import write_ledger
from decode_worker.logic import DecodeEvent, DecodeLimits, DecodeLogic, WorkCommand

logger = logging.getLogger(__name__)


def limits_of(config: DecodeWorkerConfig, batching: BatchingConfig) -> DecodeLimits:
    """What bounds the running batch."""
    low_running = max(int(batching.low_running_share * config.max_running), 1)
    switch = SwitchLimits(batching.enough_requests(config.max_running), low_running, batching.starvation_s)
    return DecodeLimits(config.max_running, config.max_tokens_per_iteration, switch)


class DecodeWorker:
    """One decode worker (colocated: one worker for both phases) on one event loop."""

    def __init__(
        self,
        *,
        limits: DecodeLimits,
        engine: WorkerEngine,
        registered: WorkerRegistered,
        membership: Membership,
        transport: str = AUTO,
    ) -> None:
        self._engine = engine
        self._ledger_path = membership.log_folder / f"{membership.name}.ledger.jsonl"
        self._pool_name = registered.pool_name
        identity = membership.identity()
        self._copier: BlockCopier = engine.copier(identity, transport=transport)
        logic = DecodeLogic(registered=registered, limits=limits, eos_token_ids=engine.eos_token_ids)
        self.ledger = logic.ledger
        self._room: Room[CommonEvent | DecodeEvent, WorkCommand] = Room(
            logic, identity, Codec(DecodeWorkerInbound), self._perform
        )

    async def start(self, *, router_at: str, pool_at: str | None, prefillers_at: Sequence[str] = ()) -> None:
        """Introduce ourselves to the router and, unless colocated, to the pool and every prefill worker."""
        for address in (*([pool_at] if pool_at is not None else []), *prefillers_at, router_at):
            self._room.switchboard.dial(address)

    async def close(self) -> None:
        """Drop the links, end the threads and leave the ledger behind."""
        await self._room.close()
        self._engine.close()
        records = self.ledger.records()
        if not records:
            return
        try:
            write_ledger(self._ledger_path, records)
        except OSError as error:
            logger.warning("the ledger cannot be written to %s: %s", self._ledger_path, error.strerror)

    def _perform(self, command: WorkCommand) -> None:
        match command:
            case RunIteration():
                self._engine.start_iteration(command, self._room.dispatch)
            case LoadBlocks():
                self._copier.start_load(command, self._room.dispatch)
            case OffloadBlocks():
                self._copier.start_offload(command, self._room.dispatch)
            case MapArena(peer, offered):
                self._copier.map_arena(peer, offered, stamps=peer != self._pool_name)
            case UnmapArena(peer):
                self._copier.unmap_arena(peer)
