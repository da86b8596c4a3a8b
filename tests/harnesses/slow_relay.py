"""A long way between two hosts: passes bytes on after a delay, as this kernel has none of its own.

python -m tests.harnesses.slow_relay LISTEN_HOST HOST PORT DELAY_S      prints the port where it listens
"""

import asyncio
import sys


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Pass each piece on `delay_s` after it came; pieces do not wait for each other."""
    loop = asyncio.get_running_loop()
    while content := await reader.read(1 << 16):
        loop.call_later(delay_s, writer.write, content)
    loop.call_later(delay_s, writer.close)


async def main() -> None:
    listen_host, host, port, delay_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(_pass_on(reader, far_writer, delay_s), _pass_on(far_reader, writer, delay_s))

    server = await asyncio.start_server(accept, listen_host, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main())
