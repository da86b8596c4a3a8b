"""The prefill worker's process: its logic, its links, its engine and the candidate buffers in its memory, joined."""

import asyncio
from functools import partial

from alignedserve.messages.events import CommonEvent
from alignedserve.messages.iterations import (
    BufferOpened,
    CloseBuffer,
    LoadBlocks,
    MapArena,
    OffloadBlocks,
    OpenBuffer,
    RelayBlocks,
    RunIteration,
)
from alignedserve.messages.links import PrefillWorkerInbound
from alignedserve.messages.wire import Codec
from alignedserve.runtime.engine.model_executor import ModelExecutor
from alignedserve.runtime.kv.candidate_memory import CandidateMemory
from alignedserve.runtime.process.logic_driver import LogicDriver
from alignedserve.runtime.process.process_spec import ProcessSpec
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
        """`make`: makes its logic, out of what can be recorded."""
        self._executor = executor
        self._memory = memory
        self._copier = executor.copier(process_spec.identity())
        self._pool_name = pool_name
        self._driver: LogicDriver[CommonEvent | PrefillEvent, WorkCommand] = LogicDriver(
            make(), process_spec, Codec(PrefillWorkerInbound), self._perform, process_spec.recorder(make)
        )

    async def start(self, *, listen_at: str, router_at: str, pool_at: str) -> None:
        """Accept decode workers and connect to pool and router."""
        await self._driver.links.listen(listen_at)
        self._driver.links.dial(pool_at)
        self._driver.links.dial(router_at)

    async def close(self) -> None:
        """Close the links, stop the threads and free the buffers."""
        await self._driver.close()
        self._executor.close()
        self._copier.close()
        self._memory.close()

    def _perform(self, command: WorkCommand) -> None:
        match command:
            case RunIteration():
                self._executor.start_iteration(command, self._driver.dispatch)
            case LoadBlocks():
                self._copier.start_load(command, self._driver.dispatch)
            case OffloadBlocks():
                self._copier.start_offload(command, self._driver.dispatch)
            case RelayBlocks():
                self._copier.start_relay(command, self._buffer_of(command), self._driver.dispatch)
            case MapArena(peer, offered, stamps):
                self._copier.map_arena(peer, offered, stamps=stamps)
            case OpenBuffer(peer, link_epoch):
                self._open_buffer(peer, link_epoch)
            case CloseBuffer(peer):
                self._copier.unmap_arena(peer)
                self._memory.close_for(peer)

    def _open_buffer(self, peer: str, link_epoch: int) -> None:
        opened = self._memory.open_for(peer)
        if opened is not None:
            self._copier.use_arena(peer, opened.arena)
        event = BufferOpened(peer, link_epoch, opened.offered if opened is not None else None)
        # Not within the dispatch that asked for it: the rest of its commands comes first.
        asyncio.get_running_loop().call_soon(self._driver.dispatch, event)

    def _buffer_of(self, command: RelayBlocks) -> str:
        """Return the decode worker whose buffer is one end of the copy; the pool is the other."""
        return command.source if command.target == self._pool_name else command.target
