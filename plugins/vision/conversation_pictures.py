"""The pictures of conversations: from URLs to places in the prompt. A process decodes them, one after another."""

import asyncio
import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from alignedserve.api.conversation import NamedPicture
from alignedserve.api.errors import NeedsGateway
from alignedserve.api.work_lanes import Lane, WorkLanes
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.picture import MAX_PICTURE_BYTES, Picture, PictureRun, picture_digest
from plugins.vision.decoder import PictureDecoder, PictureError
from plugins.vision.forms import PictureForm, Size

if TYPE_CHECKING:  # loads what only fetching needs
    from plugins.vision.picture_fetcher import PictureFetcher

_MAX_RATIO = 200  # of the edges of a picture
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.ASCII | re.IGNORECASE)


class DecodedPicture(NamedTuple):
    """A picture that has been decoded once."""

    content: bytes
    size: Size


@dataclass(frozen=True, slots=True)
class ConversationPictures:
    """The pictures of a conversation in their order."""

    pictures: tuple[DecodedPicture, ...]
    form: PictureForm

    @property
    def texts(self) -> Sequence[str]:
        return [self.form.text(picture.size) for picture in self.pictures]

    def placed(self, token_ids: Sequence[int], param: str) -> tuple[Picture, ...]:
        form = self.form
        places = [index for index, token_id in enumerate(token_ids) if token_id == form.token_id]
        counts = [form.num_tokens(picture.size) for picture in self.pictures]
        if len(places) != sum(counts):
            raise InvalidRequest("The model's chat template does not show pictures at these places.", param=param)
        done, shown = 0, []
        for picture, count in zip(self.pictures, counts, strict=True):
            runs, grid = tuple(_runs(places[done : done + count])), form.position_grid(picture.size)
            cost = 0 if form.work is None else form.work.num_tokens(count)
            digest = picture_digest(picture.content)
            shown.append(Picture(picture.content, digest, runs, grid, form.is_whole, cost))
            done += count
        return tuple(shown)


class GatewayPictures:
    """Reads the pictures of a gateway's models. Its process is started when the first picture comes."""

    def __init__(self, *, fetches: bool) -> None:
        """`fetches`: False: pictures that have a URL are for the gateway itself."""
        self._decoder = PictureDecoder()
        self._lane = Lane("pictures", num_threads=1)
        self._fetches = fetches

    @cached_property
    def fetcher(self) -> "PictureFetcher":
        """Fetches pictures; made when the first one is to be fetched."""
        from plugins.vision.picture_fetcher import PictureFetcher

        return PictureFetcher()

    async def read(
        self, named: Sequence[NamedPicture], param: str, form: PictureForm, config: GatewayConfig, lanes: WorkLanes
    ) -> ConversationPictures:
        if len(named) > config.max_pictures:
            raise InvalidRequest(f"More than {config.max_pictures} pictures in one request.", param=param)
        read, num_bytes = [], 0
        for at, content in await self._contents(named, config, lanes):
            num_bytes += len(content)
            if num_bytes > MAX_PICTURE_BYTES:
                message = f"The pictures have more than {MAX_PICTURE_BYTES} bytes together."
                raise InvalidRequest(message, param=param)
            read.append(DecodedPicture(content, await self._size(content, at, config.max_picture_pixels)))
        return ConversationPictures(tuple(read), form)

    def close(self) -> None:
        self._lane.close()
        self._decoder.close()

    async def _contents(
        self, named: Sequence[NamedPicture], config: GatewayConfig, lanes: WorkLanes
    ) -> list[tuple[str, bytes]]:
        async def content(picture: NamedPicture) -> tuple[str, bytes]:
            url, at, _ = picture
            if not url[:8].lower().startswith(("http:", "https:")):
                return at, await lanes.run(len(url), partial(_content_of, url, at, config))
            if not self._fetches:
                raise NeedsGateway
            return at, await self.fetcher.fetch(url, at, config)

        reading = [asyncio.create_task(content(picture)) for picture in named]
        try:
            return await asyncio.gather(*reading)
        finally:
            for task in reading:
                task.cancel()  # when another has failed

    async def _size(self, content: bytes, at: str, max_pixels: int) -> Size:
        try:
            size = await self._lane.run(partial(self._decoder.size, content, max_pixels))
        except PictureError as error:
            message = f"Invalid value for {at}: it {error.problem}."
            raise InvalidRequest(message, param=at, code="invalid_image") from error
        if max(size) > _MAX_RATIO * min(size):
            problem = f"it is more than {_MAX_RATIO} times as long as it is wide"
            raise InvalidRequest(f"Invalid value for {at}: {problem}.", param=at, code="invalid_image")
        return size


def _content_of(url: str, path: str, config: GatewayConfig) -> bytes:
    match = _DATA_URL.match(url[:64])
    if match is None:
        problem = "it must be a data URL such as data:image/png;base64,..."
        raise InvalidRequest(f"Invalid value for {path}: {problem}.", param=path, code="invalid_image_url")
    encoded_len = len(url) - match.end()
    if encoded_len > config.max_picture_bytes * 4 // 3 + 4:
        problem = f"a picture may have at most {config.max_picture_bytes} bytes"
        raise InvalidRequest(f"Invalid value for {path}: {problem}.", param=path, code="image_too_large")
    try:
        content = base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(
            f"Invalid value for {path}: it is not valid base64.", param=path, code="invalid_base64"
        ) from error
    if not content:
        raise InvalidRequest(f"Invalid value for {path}: the picture is empty.", param=path, code="invalid_image")
    return content


def _runs(places: Sequence[int]) -> Iterator[PictureRun]:
    for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0]):
        members = [position for _, position in run]
        yield members[0], len(members)
