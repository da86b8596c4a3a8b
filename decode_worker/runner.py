"""The decode worker at work: its logic, its links and its engine, joined."""

from collections.abc import Sequence
from functools import partial

from alignedserve.messages.events import CommonEvent
from alignedserve.messages.iterations import LoadBlocks, MapArena, OffloadBlocks, RunIteration, UnmapArena
from alignedserve.messages.links import DecodeWorkerInbound
from alignedserve.messages.wire import Codec
from alignedserve.runtime.block_copier import BlockCopier
from alignedserve.runtime.membership import Membership
from alignedserve.runtime.room import Room
from alignedserve.runtime.transport import AUTO
from alignedserve.runtime.worker_engine import WorkerEngine
from decode_worker.ledger_file import leave_ledger
from decode_worker.logic import DecodeEvent, DecodeLogic, WorkCommand


class DecodeWorker:
    """One decode worker on one event loop."""

    def __init__(
        self,
        *,
        make: "partial[DecodeLogic]",
        engine: WorkerEngine,
        pool_name: str,
        membership: Membership,
        transport: str = AUTO,
    ) -> None:
        """`make`: makes its logic, out of what can be recorded."""
        logic = make()
        self._engine = engine
        self._ledger_path = membership.log_folder / f"{membership.name}.ledger.jsonl"
        self._pool_name = pool_name
        identity = membership.identity()
        self._copier: BlockCopier = engine.copier(identity, transport=transport)
        self.ledger = logic.ledger
        self._room: Room[CommonEvent | DecodeEvent, WorkCommand] = Room(
            logic, identity, Codec(DecodeWorkerInbound), self._perform, membership.recorder(make)
        )

    async def start(self, *, router_at: str, pool_at: str, prefillers_at: Sequence[str]) -> None:
        """Introduce ourselves to the router, the pool and every prefill worker."""
        for address in (pool_at, *prefillers_at, router_at):
            self._room.switchboard.dial(address)

    async def close(self) -> None:
        """Drop the links, end the threads and leave the ledger behind."""
        await self._room.close()
        self._engine.close()
        leave_ledger(self._ledger_path, self.ledger.records())

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
