"""Asks the process that decodes pictures, which is started when the first one comes and anew when it was lost."""

import logging
import weakref
from threading import Lock

import msgspec
import numpy as np
import numpy.typing as npt

from alignedserve.core.errors import InvalidRequest
from alignedserve.core.picture import MAX_PIXELS
from alignedserve.pictures.form import PictureForm
from alignedserve.pictures.form_parts import CHANNELS, Size
from alignedserve.pictures.outcomes import Decoded, Refused, Task, decode_outcome
from alignedserve.process.child_process import ChildProcess

_MAX_WALL_S = 30.0
logger = logging.getLogger(__name__)

Pixels = npt.NDArray[np.uint8]

_REASONS = {
    "unknown": "is not a picture in a format that is read: PNG, JPEG, WebP or GIF",
    "broken": "is truncated or damaged",
    "large": "has too many pixels",
    "lost": "takes too long, or too much memory, to decode",
}


class PictureError(InvalidRequest):
    """A picture that cannot be read; the message tells nothing of its content."""

    def __init__(self, reason: str) -> None:
        """`reason`: a key of the refusals."""
        super().__init__(f"The picture {_REASONS[reason]}.", param="messages", code="invalid_image")
        self.problem = _REASONS[reason]


class PictureDecoder:
    """Safe to share between threads, which take turns; blocks meanwhile."""

    def __init__(self) -> None:
        self._process = ChildProcess("alignedserve.pictures.process", _MAX_WALL_S)
        self._lock = Lock()
        self._is_closed = False
        weakref.finalize(self, self._process.end)

    def size(self, content: bytes, max_pixels: int = MAX_PIXELS) -> Size:
        """Decode a picture, and return its size. Raises PictureError."""
        decoded = self._decoded(content, Task(max_pixels))
        return Size(decoded.width, decoded.height)

    def parts(self, content: bytes, form: PictureForm) -> list[Pixels]:
        """Return what an encoder gets of a picture, part by part [channels, height, width]. Raises PictureError."""
        decoded, parts, at = self._decoded(content, Task(MAX_PIXELS, form)), [], 0
        whole = np.frombuffer(decoded.pixels, np.uint8)
        for height, width in decoded.shapes:
            count = CHANNELS * height * width
            parts.append(whole[at : at + count].reshape(CHANNELS, height, width))
            at += count
        return parts

    def close(self) -> None:
        """End the process at once; who waits for it gets an error. May be repeated."""
        self._is_closed = True
        self._process.kill()
        with self._lock:
            self._process.end()

    def _decoded(self, content: bytes, task: Task) -> Decoded:
        with self._lock:
            answer = self._answer(content, task)
        if answer is None:
            logger.warning("a picture of %d bytes could not be decoded: its process was lost", len(content))
            raise PictureError("lost")
        outcome = decode_outcome(answer)
        if isinstance(outcome, Refused):
            raise PictureError(outcome.reason)
        return outcome

    def _answer(self, content: bytes, task: Task) -> bytes | None:
        if self._is_closed:
            return None
        if not self._process.is_running:
            self._process.start()
        answer = self._process.answer(msgspec.msgpack.encode(task), content)
        if answer is None:
            self._process.end()
        return answer
