"""Asks the process that decodes pictures, which is started when the first one comes and anew when it was lost."""

import logging
import weakref
from threading import Lock
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from alignedserve.core.errors import InvalidRequest
from alignedserve.core.picture import MAX_PIXELS
from alignedserve.process.child_process import ChildProcess
from plugins.vision.forms import CHANNELS, PictureForm, Size


class DecodingTask(msgspec.Struct, frozen=True):
    """What is to be done with the file that follows."""

    max_pixels: int
    form: PictureForm | None = None  # None: its size is asked for alone; it is decoded whole all the same


class RefusedPicture(msgspec.Struct, frozen=True, tag=True):
    """A file that is not decoded, and why."""

    reason: Literal["unknown", "broken", "large"]


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """A decoded picture: its size, and the pixels of its parts, one part after another."""

    width: int
    height: int
    shapes: tuple[tuple[int, int], ...] = ()  # height and width of each part
    pixels: bytes = b""  # of all parts: channels, rows, columns, a byte each


Outcome = RefusedPicture | Decoded
_OUTCOMES: msgspec.msgpack.Decoder[Outcome] = msgspec.msgpack.Decoder(Outcome)


def decode_outcome(raw: bytes) -> Outcome:
    """Return the outcome that the process has written. Raises msgspec.MsgspecError."""
    return _OUTCOMES.decode(raw)


_MAX_WALL_S = 30.0
logger = logging.getLogger(f"alignedserve.{__name__}")

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
        self._process = ChildProcess("plugins.vision.decoding", _MAX_WALL_S)
        self._lock = Lock()
        self._is_closed = False
        weakref.finalize(self, self._process.end)

    def size(self, content: bytes, max_pixels: int = MAX_PIXELS) -> Size:
        """Decode a picture, and return its size. Raises PictureError."""
        decoded = self._decoded(content, DecodingTask(max_pixels))
        return Size(decoded.width, decoded.height)

    def parts(self, content: bytes, form: PictureForm) -> list[Pixels]:
        """Return what an encoder gets of a picture, part by part [channels, height, width]. Raises PictureError."""
        decoded, parts, at = self._decoded(content, DecodingTask(MAX_PIXELS, form)), [], 0
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

    def _decoded(self, content: bytes, task: DecodingTask) -> Decoded:
        with self._lock:
            answer = self._answer(content, task)
        if answer is None:
            logger.warning("a picture of %d bytes could not be decoded: its process was lost", len(content))
            raise PictureError("lost")
        outcome = decode_outcome(answer)
        if isinstance(outcome, RefusedPicture):
            raise PictureError(outcome.reason)
        return outcome

    def _answer(self, content: bytes, task: DecodingTask) -> bytes | None:
        if self._is_closed:
            return None
        if not self._process.is_running:
            self._process.start()
        answer = self._process.answer(msgspec.msgpack.encode(task), content)
        if answer is None:
            self._process.end()
        return answer
