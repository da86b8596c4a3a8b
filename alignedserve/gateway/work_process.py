"""A process beside the gateway's, whose work does not hold the lock that all threads of an interpreter share."""

import logging
import weakref
from functools import partial

from alignedserve.api.errors import Overloaded
from alignedserve.api.work_lanes import Lane
from alignedserve.process.child_process import ChildProcess

logger = logging.getLogger(__name__)

_MAX_WALL_S = 120.0  # of one piece of work
_RETRY_AFTER_S = 5.0


class WorkProcess:
    """Started when the first work comes, and anew when it was lost; does one piece of work after the other."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process = ChildProcess(module, _MAX_WALL_S)
        self._lane = Lane("process", num_threads=1)
        self._is_closed = False
        weakref.finalize(self, self._process.end)

    async def answer(self, *frames: bytes) -> bytes:
        """Return the answer to these frames, in their turn. Raises Overloaded: too much waits, or it was lost."""
        answer = await self._lane.run(partial(self._answer, frames))
        if answer is None:
            logger.warning("%s was lost, or took too long, over %d bytes", self._module, len(frames[-1]))
            raise Overloaded("The request could not be read; it may be too large.", retry_after_s=_RETRY_AFTER_S)
        return answer

    def close(self) -> None:
        """End the process at once; what waits for it has no answer. Blocks for a moment. May be repeated."""
        self._is_closed = True
        self._lane.close()
        self._process.kill()
        self._lane.close(waits=True)
        self._process.end()

    def _answer(self, frames: tuple[bytes, ...]) -> bytes | None:
        if self._is_closed:
            return None
        if not self._process.is_running:
            self._process.start()
        answer = self._process.answer(*frames)
        if answer is None:
            self._process.end()
        return answer
