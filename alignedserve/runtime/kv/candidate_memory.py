"""The memory that a prefill worker lends: a candidate buffer for each decode worker that is linked to it.

A buffer is its own arena in host memory, created when the decode worker connects and removed when it disconnects, so
that late writes of an earlier epoch hit nothing. The decode worker decides on its content (AlignedServe, section 3.4).
"""

import logging
import secrets
from typing import NamedTuple

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.messages.caches import ArenaOffered
from alignedserve.runtime.kv.arena_files import arena_path
from alignedserve.runtime.kv.buffer_budget import BufferBudget
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.transfers.block_server import BlockServer
from alignedserve.runtime.kv.transfers.host_blocks import ArenaBuffer
from alignedserve.runtime.kv.transfers.open_channel import open_channel
from alignedserve.runtime.kv.transfers.registry import AUTO
from alignedserve.runtime.process.links import Identity
from alignedserve.runtime.process.process_spec import ProcessSpec

logger = logging.getLogger(__name__)

_WITHOUT_SERVER = (AUTO, "shm")


class OpenedBuffer(NamedTuple):
    """One decode worker's buffer."""

    arena: Arena
    offered: ArenaOffered
    server: BlockServer | None


class CandidateMemory:
    """The buffers by decode worker. Runs on the worker's event loop; creating one takes milliseconds."""

    def __init__(
        self, layout: BlockLayout, budget: BufferBudget, process_spec: ProcessSpec, *, transport: str = AUTO
    ) -> None:
        """`transport`: engine.kv_transport."""
        self._layout = layout
        self._budget = budget
        self._kv_transport = transport
        self._process_spec = process_spec
        self._opened: dict[str, OpenedBuffer] = {}
        self._num_made = 0

    def open_for(self, peer: str) -> OpenedBuffer | None:
        """Create a new buffer in place of any earlier one; None when there is no memory for it, which is logged."""
        self.close_for(peer)
        num_blocks = self._budget.lend(peer)
        if num_blocks < 1:
            logger.info("no candidate buffer for %s: all of prefill.candidate_buffer_bytes is lent", peer)
            return None
        # Also for one that was added here later: shared memory reaches it, and the server does no harm.
        is_far = bool(self._beyond_node) and not self._budget.is_planned_here(peer)
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
        try:
            server = self._serve_far(arena) if is_far else self._serve(arena)
        except OSError as error:  # such as no more file descriptors
            path.unlink(missing_ok=True)
            logger.warning("no candidate buffer for %s: it cannot be served: %s", peer, error)
            return None
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
        self._budget.give_back(peer)
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
        return "tcp" if is_far and self._kv_transport in _WITHOUT_SERVER else self._kv_transport

    @property
    def _beyond_node(self) -> tuple[str, ...]:
        return self._process_spec.addresses.beyond_node()

    def _serve_far(self, arena: Arena) -> BlockServer:
        """Serve a buffer to another node, at a port of this one."""
        (address,) = self._beyond_node
        transports = (self._transport(is_far=True),)
        return BlockServer(
            ArenaBuffer(arena),
            address,
            identity=self._process_spec.identity(),
            transports=transports,
            open_channel=open_channel,
        )

    def _serve(self, arena: Arena) -> BlockServer | None:
        transport = self._kv_transport
        if transport in _WITHOUT_SERVER:
            return None
        identity: Identity = self._process_spec.identity()
        # No longer than the name of a process: a run folder is refused only where those do not fit (run_folder.py).
        address = self._process_spec.addresses.of(f"b-{secrets.token_hex(4)}")
        return BlockServer(
            ArenaBuffer(arena), address, identity=identity, transports=(transport,), open_channel=open_channel
        )
