"""Accepts connections of HTTPS. Whoever has not finished its handshake of TLS takes a place, too.

The event loops' own servers know a connection only once its handshake is over: any number of clients that send nothing
would hold files and memory until then.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any

from alignedserve.gateway.connections.limits import ConnectionLimits, ConnectionPlace

_PER_TURN = 64
_PAUSE_S = 0.1  # where the process has no file left


class TlsListener:
    """Listens from its making on, until it is closed. Use it from its event loop."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        handshakes: ConnectionLimits,
        **bounds: float,
    ) -> None:
        """`handshakes`: how many there may be at a time. `bounds`: `ssl_handshake_timeout`, `ssl_shutdown_timeout`."""
        self._listener = listener
        self._make_protocol = make_protocol
        self._handshakes = handshakes
        self._settings: dict[str, Any] = {"ssl": context, **bounds}
        self._open: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept no more, and end what has not finished its handshake. The socket is its owner's to close."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()
        for handshake in self._open:
            handshake.cancel()

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_PER_TURN):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(_PAUSE_S, self._listen)
                return
            connection_place = self._handshakes.admit(str(address[0]))
            if connection_place is None:
                connection.close()
                continue
            connection.setblocking(False)
            handshake = self._loop.create_task(self._shake_hands(connection, connection_place))
            self._open.add(handshake)
            handshake.add_done_callback(self._open.discard)

    async def _shake_hands(self, connection: socket.socket, connection_place: ConnectionPlace) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection, **self._settings)
        except OSError:  # it has left, was too slow, or speaks no TLS
            connection.close()
        finally:
            connection_place.leave()
