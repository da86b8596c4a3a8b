"""A stage of a worker whose first stage is on another host: listens for it, and computes its layers for it.

The first stage dials twice: to send, and to receive. When it ends, the next first stage that dials begins anew.
"""

import asyncio
import contextlib
import logging
import os
import socket
import threading

from alignedserve.core.errors import PeerError, PeerLost, ProtocolError
from alignedserve.process.addresses import AddressResolver, worker_of_stage
from alignedserve.process.links import real_address
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.kv.transfers.control_socket import ControlSocket, keep_alive, listen_at
from plugins.stages.stage_process import serve_stage
from plugins.stages.stage_wire import StageWire

logger = logging.getLogger(f"alignedserve.{__name__}")

_SECOND_S = 30.0  # after which the first of two connections counts as left
_EXIT_BROKEN = 70  # EX_SOFTWARE


class StageService:
    """Listens from `start` on, on a thread of its own."""

    def __init__(self, process_spec: ProcessSpec) -> None:
        self._spec = process_spec
        self._identity = process_spec.identity()
        (address,) = process_spec.addresses.beyond_node()
        self._context = self._identity.trusted().listener_context() if address.startswith("tls:") else None
        self._listener = listen_at(address)
        self._address = real_address(self._listener, address)
        self._is_closed = False

    async def start(self) -> None:
        threading.Thread(target=self._serve, name="stage", daemon=True).start()
        while True:
            try:
                await AddressResolver(self._spec.addresses).publish(self._spec.name, self._address)
            except PeerError as error:
                logger.info("not published yet: %s", error)
                await asyncio.sleep(1.0)
            else:
                return

    async def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    # --- on the thread

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                commands = StageWire(self._accepted(None))
                try:
                    results = StageWire(self._accepted(_SECOND_S))
                except TimeoutError:
                    commands.close()
                    continue
            except OSError:
                break  # it was closed
            logger.info("%s computes with this stage", worker_of_stage(self._spec.name))
            try:
                serve_stage(commands, results)
            except (OSError, ProtocolError) as error:
                logger.info("the first stage is gone: %s", error)
            except BaseException:
                logger.critical("this stage is broken and ends", exc_info=True)
                logging.shutdown()
                os._exit(_EXIT_BROKEN)
            finally:
                commands.close()
                results.close()

    def _accepted(self, timeout_s: float | None) -> socket.socket:
        while True:
            self._listener.settimeout(timeout_s)
            connection, _ = self._listener.accept()
            keep_alive(connection, self._identity.peer_timeout_s)
            control = ControlSocket(connection, self._identity.peer_timeout_s)
            try:
                if self._context is not None:
                    control.encrypt(self._context, is_listener=True)
                name = control.authenticate_as_listener(self._identity).name
            except (PeerLost, ProtocolError) as error:
                logger.warning("a connection is refused: %s", error)
                control.close()
                continue
            if name == worker_of_stage(self._spec.name):
                return control.release()
            logger.warning("%s is refused, whose stage this is not", name)
            control.close()


async def start_stage(process_spec: ProcessSpec) -> StageService:
    service = StageService(process_spec)
    await service.start()
    return service
