"""Forms of families that see a picture in square tiles, beside the whole of it in one more tile."""

import math
from fractions import Fraction
from typing import Any, ClassVar

import msgspec
import numpy as np

from alignedserve.pictures.form_parts import EncoderWork, Scaling, Size

MAX_SCALED_EDGE = 4096  # of what Idefics3 makes of a picture


class TiledForm(msgspec.Struct, frozen=True, tag=True):
    """Idefics3, SmolVLM: a picture is made large and cut into square tiles, and seen whole in one more tile.

    Example: tiles of 512 and `longest_edge` 2048; 1600 x 900 pixels become 2048 x 1152, then 2048 x 1536, 3 rows of 4
    tiles and the whole; with 64 tokens each 832 tokens of the picture.
    """

    is_whole: ClassVar[bool] = False  # the tokens of a picture are computed in one pass, and read one another

    token_id: int  # that stands in prompts for each embedding, in place of `mark`
    tile_edge: int
    longest_edge: int  # to which a picture is scaled first
    tile_tokens: int  # of the prompt for each tile
    scaling: Scaling
    resample: int  # as Pillow numbers its filters
    is_cut: bool = True  # False: it is seen whole alone, however large it is
    work: EncoderWork | None = None  # None: it is not known
    mark: str = "<image>"  # what the chat template writes for a picture, and each of its tokens in the prompt
    fence: str = "<fake_token_around_image>"
    whole: str = "<global-img>"

    def scaled(self, size: Size) -> Size:
        """Return the size of what is cut into tiles: whole tiles."""
        if not self.is_cut:
            return Size(self.tile_edge, self.tile_edge)
        width, height = self.first_scaled(size)
        edge, ratio = self.tile_edge, width / height
        if width >= height:
            width = math.ceil(width / edge) * edge
            return Size(width, math.ceil(int(width / ratio) / edge) * edge)
        height = math.ceil(height / edge) * edge
        return Size(math.ceil(int(height * ratio) / edge) * edge, height)

    def first_scaled(self, size: Size) -> Size:
        """Return the size in between: pictures are scaled twice, as the model was trained."""
        width, height = size
        ratio = width / height
        if width >= height:
            width, height = self.longest_edge, _even(int(self.longest_edge / ratio))
        else:
            width, height = _even(int(self.longest_edge * ratio)), self.longest_edge
        width, height = max(width, 1), max(height, 1)
        ratio = width / height
        if width >= height and width > MAX_SCALED_EDGE:
            return Size(MAX_SCALED_EDGE, max(int(MAX_SCALED_EDGE / ratio), 1))
        if height > width and height > MAX_SCALED_EDGE:
            return Size(max(int(MAX_SCALED_EDGE * ratio), 1), MAX_SCALED_EDGE)
        return Size(width, height)

    def grid(self, size: Size) -> Size:
        """Return the columns and rows of tiles beside the whole; 0 and 0: there are none."""
        width, height = self.scaled(size)
        columns, rows = width // self.tile_edge, height // self.tile_edge
        return Size(0, 0) if columns <= 1 and rows <= 1 else Size(columns, rows)

    def num_tokens(self, size: Size) -> int:
        """Return the positions of the prompt that the picture's embeddings take."""
        columns, rows = self.grid(size)
        return (columns * rows + 1) * self.tile_tokens

    def text(self, size: Size) -> str:
        """Return what stands in the prompt in place of the template's mark."""
        columns, rows = self.grid(size)
        tokens = self.mark * self.tile_tokens
        whole = f"{self.fence}{self.whole}{tokens}{self.fence}"
        if not columns:
            return whole
        lines = [
            "".join([f"{self.fence}<row_{row + 1}_col_{column + 1}>{tokens}" for column in range(columns)])
            for row in range(rows)
        ]
        return "\n".join(lines) + "\n\n" + whole

    def position_grid(self, size: Size) -> tuple[int, int] | None:
        """Return None: the prompt's positions are as of words."""
        return None


class CanvasForm(msgspec.Struct, frozen=True, tag=True):
    """Llama 4: a picture keeps its shape on a canvas of square tiles, black beside it, and is seen whole in one more.

    Example: at most 16 tiles of 336; for 1600 x 900 pixels the smallest canvas that holds them has 5 columns and 3
    rows; with 144 tokens a tile, and the whole, 2304 tokens of the picture.
    """

    is_whole: ClassVar[bool] = False  # the tokens of a picture are computed in one pass, and read one another

    token_id: int  # that stands in prompts for each embedding, in place of `token`
    tile_edge: int
    max_tiles: int  # of a canvas
    tile_tokens: int  # of the prompt for each tile
    scaling: Scaling
    resample: int  # as Pillow numbers its filters
    is_enlarged: bool = False  # a picture fills the largest canvas that its shape allows
    work: EncoderWork | None = None  # None: it is not known
    mark: str = "<|image|>"  # what the chat template writes for a picture
    token: str = "<|patch|>"  # noqa: S105  (no password)
    start: str = "<|image_start|>"
    end: str = "<|image_end|>"
    column_end: str = "<|tile_x_separator|>"
    row_end: str = "<|tile_y_separator|>"

    def grid(self, size: Size) -> Size:
        """Return the columns and rows of the canvas: the smallest on which the picture is as large as it can be."""
        tiles = range(1, self.max_tiles + 1)
        canvases = [Size(columns, rows) for columns in tiles for rows in tiles if columns * rows <= self.max_tiles]
        factors = {own: min(Fraction(own.width, size.width), Fraction(own.height, size.height)) for own in canvases}
        enough = [factor for factor in factors.values() if factor * self.tile_edge >= 1]
        chosen = min(enough) if enough and not self.is_enlarged else max(factors.values())
        fitting = [canvas for canvas, factor in factors.items() if factor == chosen]
        return min(fitting, key=lambda canvas: canvas.width * canvas.height)

    def scaled(self, size: Size) -> Size:
        """Return the size that the picture is made on its canvas; it is enlarged to one tile at most."""
        wide, high = (tiles * self.tile_edge for tiles in self.grid(size))
        if not self.is_enlarged:
            wide, high = (min(max(own, self.tile_edge), most) for own, most in zip(size, (wide, high), strict=True))
        across, down = self._factor(wide, size.width), self._factor(high, size.height)
        if across < down:
            return Size(wide, max(min(math.floor(size.height * across), high), 1))
        return Size(max(min(math.floor(size.width * down), wide), 1), high)

    def _factor(self, target: int, edge: int) -> Any:
        is_canvas = self.is_enlarged or target < edge
        return np.float32(target) / np.float32(edge) if is_canvas else target / edge

    def num_tokens(self, size: Size) -> int:
        """Return the positions of the prompt that the picture's embeddings take."""
        columns, rows = self.grid(size)
        num_tiles = columns * rows
        return (num_tiles + (num_tiles > 1)) * self.tile_tokens

    def text(self, size: Size) -> str:
        """Return what stands in the prompt in place of the template's mark."""
        columns, rows = self.grid(size)
        tokens = self.token * self.tile_tokens
        line = self.column_end.join([tokens] * columns) + self.row_end
        lines = line * rows if columns * rows > 1 else ""
        return f"{self.start}{lines}{self.mark}{tokens}{self.end}"

    def position_grid(self, size: Size) -> tuple[int, int] | None:
        """Return None: the prompt's positions are as of words."""
        return None


def _even(edge: int) -> int:
    return edge + edge % 2
