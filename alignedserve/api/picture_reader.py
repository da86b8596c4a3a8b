"""Reads pictures of clients beside the loop: a process of its own decodes them, one after another."""

from functools import cached_property, partial
from typing import TYPE_CHECKING

from alignedserve.api.errors import NeedsGateway
from alignedserve.api.work_lanes import Lane
from alignedserve.config.sections import GatewayConfig
from alignedserve.pictures.decoder import PictureDecoder
from alignedserve.pictures.form_parts import Size

if TYPE_CHECKING:  # what it loads only those need that fetch
    from alignedserve.api.picture_fetcher import PictureFetcher


class PictureReader:
    """What all models of a gateway share. Its process is started when the first picture comes."""

    def __init__(self, *, fetches: bool = True) -> None:
        """`fetches`: False: pictures that have a URL are for the gateway itself."""
        self._decoder = PictureDecoder()
        self._lane = Lane("pictures", num_threads=1)
        self._fetches = fetches

    @cached_property
    def fetcher(self) -> "PictureFetcher":
        """Fetches pictures; made when the first one is to be fetched."""
        from alignedserve.api.picture_fetcher import PictureFetcher

        return PictureFetcher()

    async def size(self, content: bytes, max_pixels: int) -> Size:
        """Return the size of a picture, which has been decoded whole. Raises PictureError, and Overloaded."""
        return await self._lane.run(partial(self._decoder.size, content, max_pixels))

    async def fetch(self, url: str, at: str, config: GatewayConfig) -> bytes:
        """Return the picture at a URL; see PictureFetcher. Raises also NeedsGateway."""
        if not self._fetches:
            raise NeedsGateway
        return await self.fetcher.fetch(url, at, config)

    def close(self) -> None:
        """End the process and the thread. May be repeated."""
        self._lane.close()
        self._decoder.close()
