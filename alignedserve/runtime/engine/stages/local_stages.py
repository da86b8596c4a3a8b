"""Stages of a worker as processes of its own host, which share the memory of its blocks."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from alignedserve.runtime.engine.ranks.frames import encode
from alignedserve.runtime.engine.stages.stage_spec import StageSpec, StageStart
from alignedserve.runtime.engine.stages.stage_wire import FrameKind, StageWire

_MODULE = "alignedserve.runtime.engine.stages.stage_process"
_END_S = 10.0  # for a process to end once its connections are closed


class LocalStage:
    """See StageLink. The process ends with this one, however that ends."""

    def __init__(self, spec: StageSpec, index: int, blocks: int | None) -> None:
        """`blocks`: descriptor of the memory of all blocks."""
        pairs = [socket.socketpair() for _ in range(2)]
        self.commands, self.results = (StageWire(ours) for ours, _ in pairs)
        their_lifeline, self._lifeline = os.pipe()
        ends = [*(theirs.fileno() for _, theirs in pairs), their_lifeline]
        passed = ends if blocks is None else [*ends, blocks]
        command = [sys.executable, "-m", _MODULE, *map(str, ends)]
        paths = os.pathsep.join(path for path in sys.path if path)
        try:
            self.process = subprocess.Popen(  # noqa: S603
                command, pass_fds=passed, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": paths}
            )
        finally:
            for _, theirs in pairs:
                theirs.close()
            os.close(their_lifeline)
        self.commands.send(FrameKind.SPECIFICATION, encode(StageStart(index, spec, blocks)))

    def kill(self) -> None:
        """See StageLink."""
        self.process.kill()

    def close(self) -> None:
        """See StageLink."""
        self.commands.close()
        self.results.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def start_stages(spec: StageSpec, blocks: int | None) -> Sequence[LocalStage]:
    """Start the stages behind the first on this host; they load their layers beside this process."""
    return [LocalStage(spec, index, blocks) for index in range(1, spec.size)]
