"""Stages of a worker as processes of its own host, which share the memory of its blocks."""

import socket
from collections.abc import Sequence

from alignedserve.process.connected_process import ConnectedProcess
from alignedserve.runtime.engine.ranks.frames import encode
from plugins.stages.stage_spec import StageSpec, StageStart
from plugins.stages.stage_wire import FrameKind, StageWire

_MODULE = "plugins.stages"


class LocalStage:
    """The process ends with this one, however that ends."""

    def __init__(self, spec: StageSpec, index: int, blocks: int | None) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.commands, self.results = (StageWire(ours) for ours, _ in pairs)
        passed = () if blocks is None else (blocks,)
        self.process = ConnectedProcess(_MODULE, [theirs for _, theirs in pairs], passed)
        self.commands.send(FrameKind.SPECIFICATION, encode(StageStart(index, spec, blocks)))

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        self.commands.close()
        self.results.close()
        self.process.end()


def start_stages(spec: StageSpec, blocks: int | None) -> Sequence[LocalStage]:
    """Start the stages behind the first on this host; they load their layers beside this process."""
    return [LocalStage(spec, index, blocks) for index in range(1, spec.size)]
