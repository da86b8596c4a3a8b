"""The running pool: its logic, its links and the arena that it owns."""

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
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.process.logic_driver import LogicDriver
from alignedserve.runtime.process.process_spec import ProcessSpec
from kvpool.factory import make_logic
from kvpool.logic import SetBlockGeneration

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
    ) -> None:
        num_blocks = layout.blocks_in(config.memory_bytes)
        if num_blocks < 1:
            raise NotEnoughMemory(
                f"pool.memory_bytes is {config.memory_bytes}, but one block of this model takes {layout.block_bytes}"
            )
        self._arena = Arena.create(arena_path, layout, num_blocks)
        offered = ArenaOffered(str(arena_path), num_blocks, layout.block_bytes, layout.digest().hex())
        make = partial(
            make_logic,
            config=config,
            batching=batching,
            arena=offered,
            block_size=layout.block_size,
            first_lease=1 + secrets.randbelow(_MAX_FIRST_LEASE),
        )
        self._driver: LogicDriver[CommonEvent, SetBlockGeneration] = LogicDriver(
            make(), process_spec, Codec(PoolInbound), self._perform, process_spec.recorder(make)
        )

    async def start(self, *, listen_at: str, router_at: str) -> None:
        """Accept workers and connect to the router."""
        await self._driver.links.listen(listen_at)
        self._driver.links.dial(router_at)

    async def close(self) -> None:
        """Drop the links and free the memory."""
        await self._driver.close()
        self._arena.close(unlink=True)

    def _perform(self, command: SetBlockGeneration) -> None:
        self._arena.stamp(command.block_ids, command.generation)
