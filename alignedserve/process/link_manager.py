"""All links of one process: listens at its addresses, dials peers, passes every message to one handler.

Addresses are those of `addresses.py`: of sockets, or names of processes, found anew at every attempt.
"""

import asyncio
import logging
import os
from functools import partial
from typing import Protocol

from alignedserve.core.errors import PeerLost
from alignedserve.messages.wire import Codec, Message
from alignedserve.process.addresses import AddressBook, AddressResolver, is_name
from alignedserve.process.background_tasks import start_background
from alignedserve.process.links import Identity, Link, Peer, connect, listen, real_address

logger = logging.getLogger(__name__)

_TURNS_TO_ACCEPT = 3
_FIRST_RETRY_S = 0.02
_LAST_RETRY_S = 0.5
_SAY_AFTER_S = 15.0  # of failing; then after twice as long, and so on
_SAY_REFUSED_S = 60.0
_GIVE_UP_S = 60.0  # of failing, for an address that is dialled only to send to it: a gateway of a lost host
# Messages kept for an address that does not answer yet; a gateway that is gone must not fill a worker's memory.
_MAX_PENDING_MESSAGES = 4096


class LinkHandler(Protocol):
    """Handles the events of a process's links. Called on the loop, one call at a time."""

    def on_linked(self, peer: Peer) -> None:
        """Handle a new link, to which this process introduces itself."""

    def on_message(self, peer: Peer, message: Message) -> None:
        """Handle a message of the process's inbound union."""

    def on_lost(self, peer: Peer) -> None:
        """Handle the loss of a link; unanswered messages may or may not have arrived."""


class LinkManager:
    """Owns the links, one per peer name: a peer that reconnects replaces its old link."""

    def __init__(
        self, identity: Identity, codec: Codec, handler: LinkHandler, addresses: AddressBook | None = None
    ) -> None:
        """`addresses`: where names are found; None: there are none."""
        self._identity = identity
        self._codec = codec
        self._handler = handler
        self._open: dict[Link, None] = {}  # all connections, linked or not yet
        self._links: dict[str, Link] = {}
        self._dialled: dict[str, Link] = {}
        self._pending: dict[str, list[Message]] = {}
        self._diallers: dict[str, asyncio.Task[None]] = {}
        self._on_use: dict[str, None] = {}  # dialled for messages alone, and given up when they do not answer
        self._stopping: dict[str, None] = {}  # addresses not to be dialled again when their link is lost
        self._resolver = AddressResolver(addresses)
        self._servers: list[asyncio.Server] = []
        self._num_refused = 0  # connections that no line of the log has told of
        self._say_refused_s = float("-inf")

    async def listen(self, address: str) -> None:
        """Accept links at this address, or by the name of this process at published addresses. A stale Unix
        socket of a killed process is replaced. Raises PeerError when the directory does not answer."""
        for endpoint in self._resolver.listening(address):
            _remove_stale_socket(endpoint)
            server = await listen(endpoint, partial(self._make_link, None), self._identity)
            self._servers.append(server)
            if is_name(address) and not endpoint.startswith("unix:"):
                await self._resolver.publish(address, real_address(server.sockets[0], endpoint))

    def dial(self, address: str) -> None:
        self._stopping.pop(address, None)
        self._on_use.pop(address, None)
        self._start_dialling(address)

    def _start_dialling(self, address: str) -> None:
        if address not in self._diallers:
            self._pending.setdefault(address, [])
            self._diallers[address] = start_background(self._keep_dialling(address), f"dialling {address}")

    def stop_dialling(self, address: str) -> None:
        if address in self._dialled:
            self._stopping[address] = None
        else:
            self._forget(address)

    def hang_up(self, address: str) -> None:
        """Dial this address no more, and close the link to it: the handler sees it lost."""
        self.stop_dialling(address)
        link = self._dialled.get(address)
        if link is not None:
            link.close()

    def _forget(self, address: str) -> None:
        self._stopping.pop(address, None)
        self._on_use.pop(address, None)
        self._pending.pop(address, None)
        task = self._diallers.pop(address, None)
        if task is not None:
            task.cancel()

    def send(self, peer_name: str, message: Message) -> bool:
        """Send to a linked peer; False when there is no link to it."""
        link = self._links.get(peer_name)
        if link is None:
            return False
        link.send(message)
        return True

    def send_to(self, address: str, message: Message) -> None:
        """Send to an address, dialling it on first use; kept (within bounds) until it answers or is given up."""
        link = self._dialled.get(address)
        if link is not None:
            link.send(message)
            return
        if address not in self._diallers:
            self._on_use[address] = None
            self._start_dialling(address)
        if len(self._pending[address]) < _MAX_PENDING_MESSAGES:
            self._pending[address].append(message)

    def disconnect(self, peer_name: str) -> None:
        """Close the link to this peer; a dialled link is dialled again."""
        link = self._links.get(peer_name)
        if link is not None:
            link.close()

    def peers(self) -> tuple[Peer, ...]:
        return tuple(link.peer for _, link in sorted(self._links.items()) if link.peer is not None)

    async def close(self) -> None:
        for task in self._diallers.values():
            task.cancel()
        for server in self._servers:
            server.close()
        links, self._links = self._links, {}
        for link in (*links.values(), *self._dialled.values()):
            link.close()
        await asyncio.gather(*self._diallers.values(), return_exceptions=True)
        # Links in their handshake too; one that is being accepted has its connection after a turn or two of the loop.
        for _ in range(_TURNS_TO_ACCEPT):
            for link in list(self._open):
                link.close()
            await asyncio.sleep(0)

    def _make_link(self, dialled_address: str | None) -> Link:
        return Link(
            self._identity,
            self._codec,
            is_dialler=dialled_address is not None,
            on_made=self._made,
            on_linked=partial(self._linked, dialled_address),
            on_message=self._received,
            on_lost=partial(self._lost, dialled_address),
            dialled=dialled_address if dialled_address is not None and is_name(dialled_address) else "",
        )

    def _made(self, link: Link) -> None:
        self._open[link] = None  # now, as a handshake of TLS that fails says nothing of it to the link

    def _linked(self, dialled_address: str | None, link: Link) -> None:
        assert link.peer is not None, "linked before the handshake was over"
        if dialled_address is not None and not self._is_wanted(dialled_address):  # given up during the handshake
            link.close()
            return
        previous = self._links.get(link.peer.name)
        self._links[link.peer.name] = link
        if previous is not None:
            previous.close()
            self._handler.on_lost(link.peer)
        if dialled_address is not None:
            self._dialled[dialled_address] = link
        self._handler.on_linked(link.peer)
        for message in self._pending.get(dialled_address or "", ()):
            link.send(message)
        if dialled_address in self._pending:
            self._pending[dialled_address] = []

    def _is_wanted(self, address: str) -> bool:
        return address in self._diallers and address not in self._stopping

    def _received(self, link: Link, message: Message) -> None:
        assert link.peer is not None, "a message before the handshake was over"
        if self._links.get(link.peer.name) is link:  # else given up or replaced: what came with its last bytes is lost
            self._handler.on_message(link.peer, message)

    def _lost(self, dialled_address: str | None, link: Link) -> None:
        self._open.pop(link, None)
        if link.peer is None and dialled_address is None and link.problem:
            self._say_refused(link.problem)
        if dialled_address is not None and self._dialled.get(dialled_address) is link:
            del self._dialled[dialled_address]
            if dialled_address in self._stopping:
                self._forget(dialled_address)
        if link.peer is not None and self._links.get(link.peer.name) is link:
            del self._links[link.peer.name]
            self._handler.on_lost(link.peer)

    def _say_refused(self, problem: str) -> None:
        self._num_refused += 1
        now = asyncio.get_running_loop().time()
        if now >= self._say_refused_s:
            count = f", {self._num_refused} since the last such line" if self._num_refused > 1 else ""
            logger.warning("%s: a handshake failed%s: %s", self._identity.name, count, problem)
            self._num_refused, self._say_refused_s = 0, now + _SAY_REFUSED_S

    async def _keep_dialling(self, address: str) -> None:
        retry_s = _FIRST_RETRY_S
        loop = asyncio.get_running_loop()
        failing_since_s: float | None = None
        say_after_s = _SAY_AFTER_S
        while True:
            try:
                endpoint = await self._resolver.resolve(address)
                link = await connect(endpoint, partial(self._make_link, address), self._identity)
                await link.lost
                if link.peer is None:  # a connection is no link yet: a peer that refuses is not dialled without a pause
                    raise PeerLost(f"{endpoint}: {link.problem or 'it closed the connection in the handshake'}")
                retry_s, failing_since_s, say_after_s = _FIRST_RETRY_S, None, _SAY_AFTER_S
            except PeerLost as error:
                failing_since_s = failing_since_s or loop.time()
                if address in self._on_use and loop.time() - failing_since_s > _GIVE_UP_S:
                    logger.warning("%s: %s is given up: %s", self._identity.name, address, error)
                    self._forget(address)
                    return
                if loop.time() - failing_since_s > say_after_s:
                    logger.warning("%s: no link to %s for %.0f s: %s", self._identity.name, address, say_after_s, error)
                    say_after_s *= 2.0
                self._pending[address] = self._pending[address][-_MAX_PENDING_MESSAGES:]
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _LAST_RETRY_S)


def _remove_stale_socket(address: str) -> None:
    kind, _, path = address.partition(":")
    if kind == "unix" and os.path.exists(path):
        os.unlink(path)
