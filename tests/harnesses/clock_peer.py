"""Another host as far as clocks go: sends requests that arrive now, on whatever clock it has.

python -m tests.harnesses.clock_peer ADDRESS      (in a time namespace of its own)
"""

import asyncio
import sys
import time

from alignedserve.messages.gateways import SubmitRequest
from alignedserve.messages.handshake import Ping, Role
from alignedserve.messages.wire import Codec, Message
from alignedserve.process.link_manager import LinkManager
from alignedserve.process.links import Identity, Peer
from tests.support.samples import request

SECRET = b"c" * 32


class Submitter:
    """A gateway that submits one request as soon as it is linked."""

    links: LinkManager

    def on_linked(self, peer: Peer) -> None:
        self.links.send(peer.name, SubmitRequest(request(arrival_s=time.monotonic())))

    def on_message(self, peer: Peer, message: Message) -> None: ...

    def on_lost(self, peer: Peer) -> None: ...


async def main() -> None:
    submitter = Submitter()
    submitter.links = LinkManager(Identity(Role.GATEWAY, "gateway-0", SECRET), Codec(Ping), submitter)
    submitter.links.dial(sys.argv[1])
    await asyncio.sleep(30)


if __name__ == "__main__":
    asyncio.run(main())
