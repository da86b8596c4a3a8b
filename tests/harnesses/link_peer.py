"""One end of a link as a process of its own, on a host of its own.

python -m tests.harnesses.link_peer listen ADDRESS TIMEOUT_S NAME    prints where it listens
python -m tests.harnesses.link_peer dial ADDRESS TIMEOUT_S NAME      sends numbered messages

Both print "linked", "lost TIME" and, for every hundredth message in order, "message NUMBER".
"""

import asyncio
import os
import sys
import time
from pathlib import Path

import msgspec

from alignedserve.core.ids import RequestId
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.handshake import Ping, Role
from alignedserve.messages.wire import Codec, Message
from alignedserve.process.link_manager import LinkManager
from alignedserve.process.links import Identity, Peer, real_address
from alignedserve.process.tls import Credentials

CREDENTIALS = "ALIGNEDSERVE_TEST_CREDENTIALS"  # folder of a file for each name
_SEND_S = 0.005


def credentials_of(name: str) -> Credentials | None:
    """Return the credentials that the test has made for this process."""
    folder = os.environ.get(CREDENTIALS)
    return msgspec.json.decode((Path(folder) / name).read_bytes(), type=Credentials) if folder else None


class End:
    """Says what happens to its link."""

    def __init__(self) -> None:
        self.peer: str | None = None
        self._num_received = 0

    def on_linked(self, peer: Peer) -> None:
        self.peer, self._num_received = peer.name, 0
        print("linked", flush=True)

    def on_message(self, peer: Peer, message: Message) -> None:
        assert isinstance(message, AbortRequest)
        assert message.attempt == self._num_received, "out of order"
        self._num_received += 1
        if self._num_received % 100 == 0:
            print("message", self._num_received, flush=True)

    def on_lost(self, peer: Peer) -> None:
        self.peer = None
        print("lost", time.monotonic(), flush=True)


async def main() -> None:
    role, address, timeout_s, name = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]
    end = End()
    identity = Identity(Role.ROUTER, name, b"l" * 32, timeout_s, credentials_of(name))
    links = LinkManager(identity, Codec(AbortRequest | Ping), end)
    if role == "listen":
        await links.listen(address)
        print(real_address(links._servers[0].sockets[0], address), flush=True)
        await asyncio.sleep(60)
    links.dial(address)
    number, peer = 0, None
    while True:
        await asyncio.sleep(_SEND_S)
        if end.peer is None or end.peer != peer:
            number, peer = 0, end.peer
            continue
        links.send(end.peer, AbortRequest(RequestId("r"), number))
        number += 1


if __name__ == "__main__":
    asyncio.run(main())
