"""What is said to the process that decodes pictures, and what it says."""

from typing import Literal

import msgspec

from alignedserve.pictures.form import PictureForm


class Task(msgspec.Struct, frozen=True):
    """What is to be done with the file that follows."""

    max_pixels: int
    form: PictureForm | None = None  # None: its size is asked for alone; it is decoded whole all the same


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A file that is not decoded, and why."""

    reason: Literal["unknown", "broken", "large"]


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """A picture: its size as it is seen, and what an encoder gets, one part after another."""

    width: int
    height: int
    shapes: tuple[tuple[int, int], ...] = ()  # height and width of each part
    pixels: bytes = b""  # of all parts: channels, rows, columns, a byte each


Outcome = Refused | Decoded
_OUTCOMES: msgspec.msgpack.Decoder[Outcome] = msgspec.msgpack.Decoder(Outcome)


def decode_outcome(raw: bytes) -> Outcome:
    """Return the outcome that the process has written. Raises msgspec.MsgspecError."""
    return _OUTCOMES.decode(raw)
