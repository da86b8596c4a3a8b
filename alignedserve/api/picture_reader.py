"""Reads pictures of clients beside the loop: a process of its own decodes them, one after another."""

from functools import partial

from alignedserve.api.work_lanes import Lane
from alignedserve.pictures.decoder import PictureDecoder
from alignedserve.pictures.form import Size


class PictureReader:
    """What all models of a gateway share. Its process is started when the first picture comes."""

    def __init__(self) -> None:
        self._decoder = PictureDecoder()
        self._lane = Lane("pictures", num_threads=1)

    async def size(self, content: bytes, max_pixels: int) -> Size:
        """Return the size of a picture, which has been decoded whole. Raises PictureError, and Overloaded."""
        return await self._lane.run(partial(self._decoder.size, content, max_pixels))

    def close(self) -> None:
        """End the process and the thread. May be repeated."""
        self._lane.close()
        self._decoder.close()
