"""The process that decodes pictures and makes pixels of them, by Pillow: what harms a decoder harms it alone.

Reads two frames for each picture, a DecodingTask and the file; writes one, the Outcome. The operating system bounds its
memory and, for each picture, its time.
"""

import io
import os
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from alignedserve.process.child_process import bound_time
from alignedserve.process.frames import read_frame, write_frame
from plugins.vision.decoder import Decoded, DecodingTask, Outcome, Pixels, RefusedPicture
from plugins.vision.forms import (
    BudgetForm,
    CanvasForm,
    CellsForm,
    FixedForm,
    PictureForm,
    RowsForm,
    Size,
    SquareForm,
    TiledForm,
)

_MAX_MEMORY_BYTES = 3 << 30  # of addresses, most of which are other things than memory in use
_MAX_CPU_S = 10.0  # of a core, for one picture
_NICENESS = 5  # streams and passes go first where cores are few
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # no others are tried, whatever the file says


def decode(content: bytes, task: DecodingTask) -> Outcome:
    Image.MAX_IMAGE_PIXELS = None  # a limit of our own stands below
    try:
        opened = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        return RefusedPicture("unknown")
    if opened.width * opened.height > task.max_pixels:
        return RefusedPicture("large")
    opened.load()
    image = _colours(ImageOps.exif_transpose(opened))  # turned as cameras say
    if task.form is None:
        return Decoded(*image.size)
    parts = list(_PARTS[type(task.form)](image, task.form))
    shapes = tuple([(part.shape[1], part.shape[2]) for part in parts])
    return Decoded(*image.size, shapes, b"".join([part.tobytes() for part in parts]))


def _colours(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # greys of 16 bits, all of which above 255 would be white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def _tiles(image: Image.Image, form: TiledForm) -> Iterator[Pixels]:
    edge, size = form.tile_edge, Size(*image.size)
    grid = form.grid(size)
    image = _resized(image, form.first_scaled(size), form.resample)
    image = _resized(image, form.scaled(size), form.resample)
    yield from _cut(image, grid, edge)
    yield _channels_first(_resized(image, Size(edge, edge), form.resample) if grid.width else image)


def _canvas(image: Image.Image, form: CanvasForm) -> Iterator[Pixels]:
    edge, size = form.tile_edge, Size(*image.size)
    grid = form.grid(size)
    canvas = Image.new("RGB", (grid.width * edge, grid.height * edge))
    canvas.paste(_resized(image, form.scaled(size), form.resample))
    yield from _cut(canvas, grid, edge)
    if grid.width * grid.height > 1:
        yield _channels_first(_resized(image, Size(edge, edge), form.resample))


def _cut(image: Image.Image, grid: Size, edge: int) -> Iterator[Pixels]:
    for row in range(grid.height):
        for column in range(grid.width):
            box = (column * edge, row * edge, (column + 1) * edge, (row + 1) * edge)
            yield _channels_first(image.crop(box))


def _whole(image: Image.Image, form: RowsForm | CellsForm | SquareForm | FixedForm | BudgetForm) -> Iterator[Pixels]:
    yield _channels_first(_resized(image, form.scaled(Size(*image.size)), form.resample))


def _resized(image: Image.Image, size: Size, resample: int) -> Image.Image:
    return image.resize(size, resample=cast(Any, resample))


def _channels_first(image: Image.Image) -> Pixels:
    return np.ascontiguousarray(np.asarray(image, np.uint8).transpose(2, 0, 1))


_PARTS: dict[type[PictureForm], Callable[[Image.Image, Any], Iterator[Pixels]]] = {
    TiledForm: _tiles,
    RowsForm: _whole,
    CellsForm: _whole,
    SquareForm: _whole,
    FixedForm: _whole,
    CanvasForm: _canvas,
    BudgetForm: _whole,
}


def main() -> None:
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    tasks = msgspec.msgpack.Decoder(DecodingTask)
    while (described := read_frame(source)) is not None and (content := read_frame(source)) is not None:
        bound_time(_MAX_CPU_S)
        write_frame(target, msgspec.msgpack.encode(_outcome(content, tasks.decode(described))))


def _outcome(content: bytes, task: DecodingTask) -> Outcome:
    try:
        return decode(content, task)
    except Exception:  # noqa: BLE001  (decoders raise anything over broken files, and none of it is for others' eyes)
        return RefusedPicture("broken")
