"""The prefill workers and pools with which a decode worker exchanges blocks.

It keeps links to those that the router announces, and to the pool of its own node.
"""

from alignedserve.messages.events import Dial, StopDialling
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import BlocksLoaded
from alignedserve.messages.workers import BlocksFetched, PeersChanged


class BlockPeers:
    """Names that are being dialled, in the order in which they were announced, and those of pools among all peers."""

    def __init__(self, pool_name: str) -> None:
        """`pool_name`: the pool of this node, which is dialled from the start."""
        self._names: dict[str, None] = {}
        self._own_pool = pool_name
        self._pools: dict[str, None] = {pool_name: None}

    def connected(self, role: Role, peer: str) -> None:
        """Note what a peer is."""
        if role is Role.KV_POOL:
            self._pools[peer] = None

    def is_pool(self, peer: str) -> bool:
        """Return whether this peer is a pool; others offer candidate buffers."""
        return peer in self._pools

    def fetched(self, event: BlocksLoaded) -> BlocksFetched | None:
        """Report how long blocks took from a pool of another node; None: they came from elsewhere, or did not come."""
        if event.source == self._own_pool or event.source not in self._pools or event.refused:
            return None
        return BlocksFetched(event.source, sum(len(load.block_ids) for load in event.loads), event.duration_s)

    def changed(self, message: PeersChanged) -> list[Dial | StopDialling]:
        """Dial those that have joined and stop dialling those that are gone; repeated messages change nothing."""
        joined = dict.fromkeys(message.joined)
        left = [name for name in self._names if name not in joined] if message.is_complete else message.left
        commands: list[Dial | StopDialling] = []
        for name in left:
            if name in self._names and name not in joined:
                del self._names[name]
                commands.append(StopDialling(name))
        for name in joined:
            if name not in self._names:
                self._names[name] = None
                commands.append(Dial(name))
        return commands
