"""The running pool: its logic, links and arena."""

import secrets
from functools import partial
from pathlib import Path

from alignedserve.config.sections import BatchingConfig, PoolConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.messages.caches import ArenaOffered
from alignedserve.messages.events import CommonEvent
from alignedserve.messages.links import PoolInbound
from alignedserve.messages.wire import Codec
from alignedserve.process.logic_driver import LogicDriver
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.transfers.block_server import BlockServer
from alignedserve.runtime.kv.transfers.host_blocks import ArenaBuffer
from kvpool.logic import make_logic
from kvpool.state import SetBlockGeneration

_BEYOND_NODE = "tcp"  # the transport to other nodes
_MAX_FIRST_LEASE = 1 << 39  # half of what a message can carry


class KvPool:
    """The KV pool of one node. `arena_path` is in a memory file system; the file exists as long as this object."""

    def __init__(
        self,
        *,
        config: PoolConfig,
        batching: BatchingConfig,
        layout: BlockLayout,
        arena_path: Path,
        process_spec: ProcessSpec,
        takes_requests: bool = True,
    ) -> None:
        """`takes_requests`: on their way between workers; False: it keeps prefix blocks alone."""
        setting = "pool.memory_bytes" if takes_requests else "prefix_cache.host_bytes"
        num_blocks = layout.blocks_in(config.memory_bytes)
        if num_blocks < 1:
            raise NotEnoughMemory(
                f"{setting} is {config.memory_bytes}, but one block of this model takes {layout.block_bytes}"
            )
        self._arena = Arena.create(arena_path, layout, num_blocks, setting=setting)
        try:
            self._server = _serve_beyond_node(self._arena, process_spec)
        except OSError:
            self._arena.close(unlink=True)
            raise
        offered = ArenaOffered(
            str(arena_path),
            num_blocks,
            layout.block_bytes,
            layout.digest().hex(),
            served_at=self._server.address if self._server is not None else "",
            transports=("shm",) if self._server is None else ("shm", _BEYOND_NODE),
            file_id=self._arena.file_id,
        )
        make = partial(
            make_logic,
            config=config,
            batching=batching,
            arena=offered,
            block_size=layout.block_size,
            first_lease=1 + secrets.randbelow(_MAX_FIRST_LEASE),
            takes_requests=takes_requests,
            state_blocks=layout.state_blocks,
        )
        self._driver: LogicDriver[CommonEvent, SetBlockGeneration] = LogicDriver(
            make(), process_spec, Codec(PoolInbound), self._perform, process_spec.recorder(make)
        )

    async def start(self, *, listen_at: str, router_at: str) -> None:
        await self._driver.links.listen(listen_at)
        self._driver.links.dial(router_at)

    async def close(self) -> None:
        await self._driver.close()
        if self._server is not None:
            self._server.close()
        self._arena.close(unlink=True)

    def _perform(self, command: SetBlockGeneration) -> None:
        self._arena.stamp(command.block_ids, command.generation)


def _serve_beyond_node(arena: Arena, process_spec: ProcessSpec) -> BlockServer | None:
    for address in process_spec.addresses.beyond_node():
        buffer = ArenaBuffer(arena, writer_stamps=False)
        return BlockServer(buffer, address, identity=process_spec.identity(), transports=(_BEYOND_NODE,))
    return None
