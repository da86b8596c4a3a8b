"""A gateway on a shared port, in its own process; it says when it serves. Arguments: port, seconds between tokens."""

import asyncio
import os
import sys

from alignedserve.config.sections import GatewayConfig
from alignedserve.gateway.server import HttpServer, bind
from tests.gateway.support import services_for
from tests.harnesses.scripted_backend import Script, ScriptedBackend


async def main() -> None:
    """Serve until the input ends."""
    script = Script((5,) * 200, token_delay_s=float(sys.argv[2]))
    services = services_for(ScriptedBackend(lambda _: script), GatewayConfig(shared_port=True))
    server = HttpServer(services, bind("127.0.0.1", int(sys.argv[1]), is_shared=True))
    await server.start()
    print(os.getpid(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()


if __name__ == "__main__":
    asyncio.run(main())
