"""The pictures of a conversation: from URLs to places in the prompt."""

import asyncio
import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

from alignedserve.api.conversation import Conversation, NamedPicture
from alignedserve.api.models.model_card import PromptServices
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.picture import MAX_PICTURE_BYTES, Picture, PictureRun, picture_digest
from alignedserve.pictures.decoder import PictureError
from alignedserve.pictures.form import PictureForm
from alignedserve.pictures.form_parts import Size

_MAX_RATIO = 200  # of the edges of a picture
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.ASCII | re.IGNORECASE)


class ReadPicture(NamedTuple):
    """A picture that has been decoded once."""

    content: bytes
    size: Size


async def read_pictures(conversation: Conversation, services: PromptServices) -> list[ReadPicture]:
    """Return the pictures of a conversation in their order.

    Raises InvalidRequest naming the field: of a model that does not see, of too many or too large ones, of URLs that
    carry no picture or lead where none is fetched from, of files that cannot be decoded. Raises also Unfetched.
    """
    named = [picture for message in conversation.messages for picture in message.pictures]
    if not named:
        return []
    if services.model.picture_form is None:
        path = named[0].kind_path
        raise InvalidRequest(f"{path}: this model does not see pictures.", param=path, code="unsupported_parameter")
    config, param = services.config, conversation.names.messages
    if len(named) > config.max_pictures:
        raise InvalidRequest(f"More than {config.max_pictures} pictures in one request.", param=param)
    read, num_bytes = [], 0
    for picture, content in zip(named, await _contents(named, services), strict=True):
        at = picture.path
        num_bytes += len(content)
        if num_bytes > MAX_PICTURE_BYTES:
            raise InvalidRequest(f"The pictures have more than {MAX_PICTURE_BYTES} bytes together.", param=param)
        try:
            size = await services.pictures.size(content, config.max_picture_pixels)
        except PictureError as error:
            message = f"Invalid value for {at}: it {error.problem}."
            raise InvalidRequest(message, param=at, code="invalid_image") from error
        if max(size) > _MAX_RATIO * min(size):
            problem = f"it is more than {_MAX_RATIO} times as long as it is wide"
            raise InvalidRequest(f"Invalid value for {at}: {problem}.", param=at, code="invalid_image")
        read.append(ReadPicture(content, size))
    return read


def placed(
    pictures: Sequence[ReadPicture], token_ids: Sequence[int], form: PictureForm, param: str
) -> tuple[Picture, ...]:
    """Return the pictures at their places in the prompt. Raises InvalidRequest unless it has one for every token."""
    places = [place for place, token_id in enumerate(token_ids) if token_id == form.token_id]
    counts = [form.num_tokens(picture.size) for picture in pictures]
    if len(places) != sum(counts):
        raise InvalidRequest("The model's chat template does not show pictures at these places.", param=param)
    done, shown = 0, []
    for picture, count in zip(pictures, counts, strict=True):
        runs, grid = tuple(_runs(places[done : done + count])), form.position_grid(picture.size)
        cost = 0 if form.work is None else form.work.num_tokens(count)
        digest = picture_digest(picture.content)
        shown.append(Picture(picture.content, digest, runs, grid, form.is_whole, cost))
        done += count
    return tuple(shown)


async def _contents(pictures: Sequence[NamedPicture], services: PromptServices) -> list[bytes]:
    config = services.config

    async def content(url: str, at: str) -> bytes:
        if url[:8].lower().startswith(("http:", "https:")):
            return await services.pictures.fetch(url, at, config)
        return await services.lanes.run(len(url), partial(_content_of, url, at, config))

    reading = [asyncio.create_task(content(url, at)) for url, at, _ in pictures]
    try:
        return await asyncio.gather(*reading)
    finally:
        for task in reading:
            task.cancel()  # those beside one that has failed


def _content_of(url: str, path: str, config: GatewayConfig) -> bytes:
    found = _DATA_URL.match(url[:64])
    if found is None:
        problem = "it must be a data URL such as data:image/png;base64,..."
        raise InvalidRequest(f"Invalid value for {path}: {problem}.", param=path, code="invalid_image_url")
    encoded_len = len(url) - found.end()
    if encoded_len > config.max_picture_bytes * 4 // 3 + 4:
        problem = f"a picture may have at most {config.max_picture_bytes} bytes"
        raise InvalidRequest(f"Invalid value for {path}: {problem}.", param=path, code="image_too_large")
    try:
        content = base64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(
            f"Invalid value for {path}: it is not valid base64.", param=path, code="invalid_base64"
        ) from error
    if not content:
        raise InvalidRequest(f"Invalid value for {path}: the picture is empty.", param=path, code="invalid_image")
    return content


def _runs(places: Sequence[int]) -> Iterator[PictureRun]:
    for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0]):
        members = [place for _, place in run]
        yield members[0], len(members)
