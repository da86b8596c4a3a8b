"""Decodes pictures and makes pixels of them, by Pillow; inside the process that may come to harm over it alone."""

import io
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from alignedserve.pictures.form import BudgetForm, CellsForm, FixedForm, PictureForm, RowsForm, SquareForm
from alignedserve.pictures.form_parts import Size
from alignedserve.pictures.outcomes import Decoded, Outcome, Refused, Task
from alignedserve.pictures.tiled_forms import CanvasForm, TiledForm

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # no others are tried, whatever the file says
Pixels = npt.NDArray[np.uint8]


def decode(content: bytes, task: Task) -> Outcome:
    """Decode a file. May raise anything that decoders do over a broken one."""
    Image.MAX_IMAGE_PIXELS = None  # a limit of our own stands below
    try:
        opened = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        return Refused("unknown")
    if opened.width * opened.height > task.max_pixels:
        return Refused("large")
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
