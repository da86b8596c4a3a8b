"""A log on the screen: its end, and what is written from then on."""

import time
from collections.abc import Callable

from alignedserve.core.errors import ResourceError
from alignedserve.process.logs.files import LogPart

TAIL_BYTES = 4096
_FOLLOW_S = 0.5


def show_log(name: str, read: Callable[[int], LogPart | None], *, follow: bool) -> None:
    """Print the end of a log, with `follow` also what comes.

    `read`: returns the part that begins at a byte; counted from the end, where it is negative. Raises ResourceError
    when there is no log of this name.
    """
    offset = -TAIL_BYTES
    while True:
        part = read(offset)
        if part is None:
            raise ResourceError(f"{name} has not written a log yet")
        print(part.text, end="", flush=True)
        offset = part.offset
        if not part.text:
            if not follow:
                return
            time.sleep(_FOLLOW_S)
