"""The prefill workers and pools with which a decode worker exchanges blocks.

It keeps links to the pool and the prefill workers of its own node. Other nodes may have thousands: it links with a
peer there when the router is about to need it, and hangs up after `LINK_IDLE_S` without use.
"""

from collections.abc import Callable, Collection

from typing_extensions import override

from alignedserve.messages.events import Dial, HangUp, Received, StopDialling
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import BlocksLoaded
from alignedserve.messages.workers import BlocksFetched, PeerNeeded, PeersChanged
from alignedserve.worker_core.part import Commands, WorkerEvent, WorkerPart

LINK_IDLE_S = 60.0
UNREACHED_REST_S = 30.0  # after a copy that read nothing: each such try may take a transfer's whole patience


class BlockPeers(WorkerPart):
    """Names that are dialled, in the order in which they were announced or needed, and pools among all peers."""

    def __init__(self, pool_name: str) -> None:
        self._names: dict[str, None] = {}
        self._used_s: dict[str, float] = {}  # when those of other nodes were last needed or used
        self._own_pool = pool_name
        self._pools: dict[str, None] = {pool_name: None}

    @override
    def takes(self, event: WorkerEvent) -> bool:
        return isinstance(event, Received) and isinstance(event.message, PeersChanged | PeerNeeded)

    @override
    def on_event(self, event: WorkerEvent, now: float) -> Commands:
        match event:
            case Received(_, PeersChanged() as changed):
                return self.changed(changed)
            case Received(_, PeerNeeded(peer)):
                return self.needed(peer, now)
        raise AssertionError("an event of others")

    def connected(self, role: Role, peer: str) -> bool:
        if role is Role.KV_POOL:
            self._pools[peer] = None
        return peer in self._used_s

    def is_pool(self, peer: str) -> bool:
        return peer in self._pools

    def fetched(self, event: BlocksLoaded) -> BlocksFetched | None:
        """Report how long blocks took from a pool of another node; None: they came from elsewhere, or did not come."""
        if event.source == self._own_pool or event.source not in self._pools or event.refused:
            return None
        return BlocksFetched(event.source, sum(len(load.block_ids) for load in event.loads), event.duration_s)

    def needed(self, peer: str, now: float) -> list[Dial]:
        if peer in self._names or peer == self._own_pool:
            return []
        commands = [] if peer in self._used_s else [Dial(peer)]
        self._used_s[peer] = now
        return commands

    def hang_up_unused(self, now: float, in_use: Callable[[], Collection[str]]) -> list[HangUp]:
        if not self._used_s:
            return []
        self._used_s |= {peer: now for peer in in_use() if peer in self._used_s}
        unused = [peer for peer, used_s in self._used_s.items() if now - used_s >= LINK_IDLE_S]
        for peer in unused:
            del self._used_s[peer]
        return [HangUp(peer) for peer in unused]

    def changed(self, message: PeersChanged) -> list[Dial | StopDialling]:
        """Dial peers that have joined and stop dialling peers that have left; repeated messages change nothing."""
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
                if self._used_s.pop(name, None) is None:
                    commands.append(Dial(name))
        return commands
