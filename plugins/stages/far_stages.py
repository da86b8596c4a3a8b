"""Connects a worker to its stages on other hosts."""

import logging
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial

from alignedserve.core.errors import PeerError, PeerLost
from alignedserve.process.addresses import Publication, stage_name
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.engine.ranks.frames import encode
from alignedserve.runtime.kv.transfers.control_socket import dial
from plugins.stages.stage_group import StageLink
from plugins.stages.stage_spec import StageSpec, StageStart
from plugins.stages.stage_wire import FrameKind, StageWire

logger = logging.getLogger(f"alignedserve.{__name__}")

_WAIT_S = 120.0  # for a stage whose process starts, or has lost its worker only now
_PAUSE_S = 0.5


class FarStage:
    """A stage on another host. Its engine ends with the connections, its process goes on."""

    def __init__(self, commands: socket.socket, results: socket.socket) -> None:
        self.commands, self.results = StageWire(commands), StageWire(results)

    def kill(self) -> None:
        self.close()

    def close(self) -> None:
        self.commands.close()
        self.results.close()


def far_stages(process_spec: ProcessSpec) -> Callable[[StageSpec], Sequence[StageLink]]:
    """Return a function that connects the worker to stages on other hosts."""
    return partial(_connect, process_spec)


def _connect(process_spec: ProcessSpec, spec: StageSpec) -> Sequence[StageLink]:
    links: list[FarStage] = []
    try:
        for index in range(1, spec.size):
            links.append(_link(process_spec, stage_name(process_spec.name, index)))
            links[-1].commands.send(FrameKind.SPECIFICATION, encode(StageStart(index, spec, None)))
    except BaseException as error:
        for link in links:
            link.close()
        if isinstance(error, OSError):
            raise PeerLost(f"a stage of this worker is gone: {error}") from error
        raise
    return links


def _link(process_spec: ProcessSpec, name: str) -> FarStage:
    ends_s = time.monotonic() + _WAIT_S
    while True:
        try:
            address, identity = _address_of(process_spec, name), process_spec.identity()
            commands = dial(address, identity)
            try:
                return FarStage(commands.release(), dial(address, identity).release())
            except PeerError:
                commands.close()
                raise
        except PeerError as error:
            if time.monotonic() > ends_s:
                raise PeerLost(f"{name}, on another host, cannot be reached: {error}") from error
            logger.info("%s is waited for: %s", name, error)
            time.sleep(_PAUSE_S)


def _address_of(process_spec: ProcessSpec, name: str) -> str:
    directory = process_spec.addresses.directory
    assert directory is not None, "stages on other hosts without a directory"
    entry = directory.look_up(name)
    if entry is None:
        raise PeerLost(f"{name} has not published an address")
    return Publication.decode(entry).address
