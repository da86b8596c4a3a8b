"""The memory that a prefill worker lends: a candidate buffer for each decode worker that is linked to it.

A buffer is its own arena in host memory, created when the decode worker connects and removed when it disconnects, so
that late writes of an earlier epoch hit nothing. The decode worker decides on its content (AlignedServe, section 3.4).
"""

import logging
from dataclasses import dataclass
from typing import NamedTuple

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.messages.caches import ArenaOffered
from alignedserve.runtime.kv.arena_files import arena_path
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.transfers.block_server import BlockServer
from alignedserve.runtime.kv.transfers.host_blocks import ArenaBuffer
from alignedserve.runtime.process.links import Identity
from alignedserve.runtime.process.process_spec import ProcessSpec

logger = logging.getLogger(__name__)

_WITHOUT_SERVER = ("auto", "shm")


class OpenedBuffer(NamedTuple):
    """One decode worker's buffer."""

    arena: Arena
    offered: ArenaOffered
    server: BlockServer | None


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """The size of the buffers and their transport."""

    num_blocks: int  # of each; 0: no buffers
    transport: str  # engine.kv_transport
    near: frozenset[str] | None = None  # decode workers of this node; None: all are
    num_far_blocks: int = 0  # of each buffer for a decode worker of another node


class CandidateMemory:
    """The buffers by decode worker. Runs on the worker's event loop; creating one takes milliseconds."""

    def __init__(self, layout: BlockLayout, sizes: BufferSizes, process_spec: ProcessSpec) -> None:
        self._layout = layout
        self._sizes = sizes
        self._process_spec = process_spec
        self._opened: dict[str, OpenedBuffer] = {}
        self._num_made = 0

    def open_for(self, peer: str) -> OpenedBuffer | None:
        """Create a new buffer in place of any earlier one; None when there is no memory for it, which is logged."""
        self.close_for(peer)
        is_far = self._sizes.near is not None and peer not in self._sizes.near
        num_blocks = self._sizes.num_far_blocks if is_far else self._sizes.num_blocks
        if num_blocks < 1:
            return None
        self._num_made += 1
        name = f"{self._process_spec.name}-for-{peer}-{self._num_made}"
        path = arena_path(self._process_spec.cluster_id, name)
        try:
            arena = Arena.create(
                path,
                self._layout,
                num_blocks,
                purpose="a candidate buffer",
                setting="prefill.candidate_buffer_bytes",
            )
        except NotEnoughMemory as error:
            logger.warning("no candidate buffer for %s: %s", peer, error)
            return None
        server = self._serve_far(arena) if is_far else self._serve(arena, name)
        offered = ArenaOffered(
            str(path),
            arena.num_blocks,
            self._layout.block_bytes,
            self._layout.digest().hex(),
            served_at=server.address if server is not None else "",
            transports=("shm",) if server is None else ("shm", self._transport(is_far=is_far)),
            file_id=arena.file_id,
            pool_name=self._process_spec.pool_name,
        )
        opened = self._opened[peer] = OpenedBuffer(arena, offered, server)
        return opened

    def close_for(self, peer: str) -> None:
        """Release the buffer; its memory is freed once no process maps it."""
        opened = self._opened.pop(peer, None)
        if opened is None:
            return
        if opened.server is not None:
            opened.server.close()
        opened.arena.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release all buffers."""
        for peer in list(self._opened):
            self.close_for(peer)

    def _transport(self, *, is_far: bool) -> str:
        return "tcp" if is_far and self._sizes.transport in _WITHOUT_SERVER else self._sizes.transport

    def _serve_far(self, arena: Arena) -> BlockServer:
        """Serve a buffer to another node, at a port of this one."""
        (address,) = self._process_spec.addresses.beyond_node()
        transports = (self._transport(is_far=True),)
        return BlockServer(ArenaBuffer(arena), address, identity=self._process_spec.identity(), transports=transports)

    def _serve(self, arena: Arena, name: str) -> BlockServer | None:
        transport = self._sizes.transport
        if transport in _WITHOUT_SERVER:
            return None
        identity: Identity = self._process_spec.identity()
        address = self._process_spec.addresses.of(name)
        return BlockServer(ArenaBuffer(arena), address, identity=identity, transports=(transport,))
