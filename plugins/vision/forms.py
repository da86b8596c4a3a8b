"""How a family of models sees pictures: what becomes of a picture's size, and what stands for it in a prompt.

A form is numbers and names alone, read once from the model's files: gateways make prompts by it, and the process that
decodes makes pixels by it.
"""

import math
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

CHANNELS = 3

Rgb = tuple[float, float, float]


class Size(NamedTuple):
    """The size of a picture or of a part of it, in pixels."""

    width: int
    height: int


class Scaling(msgspec.Struct, frozen=True):
    """What is made of pixels of 0 to 255 before an encoder sees them: (pixel * rescale - mean) / deviation."""

    rescale: float
    mean: Rgb
    deviation: Rgb
    is_short: bool = False  # each step is rounded to bfloat16


class EncoderWork(msgspec.Struct, frozen=True):
    """What an encoder's pass over a picture costs: in prompt tokens of the text part, by products of numbers.

    Example: SigLIP before a text part of 3.2G weights a token: 27 layers of 15.2M weights, and 2 * 1152 products for a
    pair of patches; 4096 patches cost 4096 * (0.128 + 4096 * 1.94e-5) = 850 tokens, beside the 256 that they become.
    """

    token_patches: int  # of a picture's token
    patch_tokens: float  # the cost of a patch alone
    pair_tokens: float  # more for each patch in its reach
    part_patches: int | None = None  # in reach of one another; None: the whole picture

    def num_tokens(self, num_tokens: int) -> int:
        """Return what a picture of so many tokens costs."""
        patches = num_tokens * self.token_patches
        seen = patches if self.part_patches is None else min(self.part_patches, patches)
        return math.ceil(patches * (self.patch_tokens + seen * self.pair_tokens))


MAX_SCALED_EDGE = 4096  # of what Idefics3 makes of a picture


class TiledForm(msgspec.Struct, frozen=True, tag=True):
    """Idefics3, SmolVLM: a picture is made large and cut into square tiles, and seen whole in one more tile.

    Example: tiles of 512 and `longest_edge` 2048; 1600 x 900 pixels become 2048 x 1152, then 2048 x 1536, 3 rows of 4
    tiles and the whole; with 64 tokens each 832 tokens of the picture.
    """

    is_whole: ClassVar[bool] = False  # the tokens of a picture are computed in one pass, and read one another

    token_id: int  # in prompts, for each embedding, in place of `mark`
    tile_edge: int
    longest_edge: int  # to which a picture is scaled first
    tile_tokens: int  # of the prompt for each tile
    scaling: Scaling
    resample: int  # Pillow's number of the filter
    is_cut: bool = True  # False: it is seen whole alone, however large it is
    work: EncoderWork | None = None  # None: unknown
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
        columns, rows = self.grid(size)
        return (columns * rows + 1) * self.tile_tokens

    def text(self, size: Size) -> str:
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

    token_id: int  # in prompts, for each embedding, in place of `token`
    tile_edge: int
    max_tiles: int  # of a canvas
    tile_tokens: int  # of the prompt for each tile
    scaling: Scaling
    resample: int  # Pillow's number of the filter
    is_enlarged: bool = False  # a picture fills the largest canvas that its shape allows
    work: EncoderWork | None = None  # None: unknown
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
        factors = {
            canvas: min(Fraction(canvas.width, size.width), Fraction(canvas.height, size.height)) for canvas in canvases
        }
        enough = [factor for factor in factors.values() if factor * self.tile_edge >= 1]
        chosen = min(enough) if enough and not self.is_enlarged else max(factors.values())
        fitting = [canvas for canvas, factor in factors.items() if factor == chosen]
        return min(fitting, key=lambda canvas: canvas.width * canvas.height)

    def scaled(self, size: Size) -> Size:
        """Return the size that the picture is made on its canvas; it is enlarged to one tile at most."""
        wide, high = (tiles * self.tile_edge for tiles in self.grid(size))
        if not self.is_enlarged:
            wide, high = (min(max(edge, self.tile_edge), most) for edge, most in zip(size, (wide, high), strict=True))
        across, down = self._factor(wide, size.width), self._factor(high, size.height)
        if across < down:
            return Size(wide, max(min(math.floor(size.height * across), high), 1))
        return Size(max(min(math.floor(size.width * down), wide), 1), high)

    def _factor(self, target: int, edge: int) -> Any:
        is_canvas = self.is_enlarged or target < edge
        return np.float32(target) / np.float32(edge) if is_canvas else target / edge

    def num_tokens(self, size: Size) -> int:
        columns, rows = self.grid(size)
        num_tiles = columns * rows
        return (num_tiles + (num_tiles > 1)) * self.tile_tokens

    def text(self, size: Size) -> str:
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


class RowsForm(msgspec.Struct, frozen=True, tag=True):
    """Pixtral, Mistral 3: a picture keeps its shape, and is read row by row in square cells.

    Example: cells of 16 and `longest_edge` 1024; 1600 x 900 pixels become 1024 x 576, 36 rows of 64 cells, each a
    token, and behind each row one more.
    """

    is_whole: ClassVar[bool] = False  # the tokens of a picture are computed in one pass, and read one another

    token_id: int  # in prompts, for each embedding, in place of `mark`
    cell_edge: int  # of patches joined to one token
    longest_edge: int  # a larger picture is made smaller
    scaling: Scaling
    resample: int  # Pillow's number of the filter
    work: EncoderWork | None = None  # None: unknown
    mark: str = "[IMG]"
    row_end: str = "[IMG_BREAK]"
    end: str = "[IMG_END]"

    def scaled(self, size: Size) -> Size:
        """Return the size that the picture is made: whole cells."""
        columns, rows = self.grid(size)
        return Size(columns * self.cell_edge, rows * self.cell_edge)

    def grid(self, size: Size) -> Size:
        ratio = max(max(size) / self.longest_edge, 1.0)
        width, height = (max(int(edge / ratio), 1) for edge in size)
        return Size((width - 1) // self.cell_edge + 1, (height - 1) // self.cell_edge + 1)

    def num_tokens(self, size: Size) -> int:
        columns, rows = self.grid(size)
        return columns * rows

    def text(self, size: Size) -> str:
        columns, rows = self.grid(size)
        return self.row_end.join([self.mark * columns] * rows) + self.end

    def position_grid(self, size: Size) -> tuple[int, int] | None:
        """Return None: the prompt's positions are as of words."""
        return None


class CellsForm(msgspec.Struct, frozen=True, tag=True):
    """Qwen2.5-VL, Qwen3-VL: a picture keeps its shape, and its tokens have positions of rows and columns.

    Example: cells of 28 and at most 1 003 520 pixels; 1600 x 900 pixels become 1316 x 728, 26 rows of 47 cells.
    """

    is_whole: ClassVar[bool] = False  # the tokens of a picture are computed in one pass, and read one another

    token_id: int  # in prompts, for each embedding, as `mark`
    cell_edge: int  # of patches joined to one token
    min_pixels: int
    max_pixels: int
    scaling: Scaling
    resample: int  # Pillow's number of the filter
    work: EncoderWork | None = None  # None: unknown
    mark: str = "<|image_pad|>"

    def scaled(self, size: Size) -> Size:
        """Return the size that the picture is made: whole cells."""
        edge, pixels = self.cell_edge, size.width * size.height
        width, height = (round(length / edge) * edge for length in size)
        if width * height > self.max_pixels:
            beta = math.sqrt(pixels / self.max_pixels)
            width, height = (max(edge, math.floor(length / beta / edge) * edge) for length in size)
        elif width * height < self.min_pixels:
            beta = math.sqrt(self.min_pixels / pixels)
            width, height = (math.ceil(length * beta / edge) * edge for length in size)
        return Size(max(width, edge), max(height, edge))

    def num_tokens(self, size: Size) -> int:
        rows, columns = self.position_grid(size)
        return rows * columns

    def text(self, size: Size) -> str:
        return self.mark * self.num_tokens(size)

    def position_grid(self, size: Size) -> tuple[int, int]:
        """Return the rows and columns of the picture's tokens, by which their positions count."""
        width, height = self.scaled(size)
        return height // self.cell_edge, width // self.cell_edge


class SquareForm(msgspec.Struct, frozen=True, tag=True):
    """Gemma 3: a picture becomes a square, whatever its shape, and its tokens read one another both ways.

    Example: an edge of 896; 1600 x 900 pixels become 896 x 896, and 256 tokens.
    """

    is_whole: ClassVar[bool] = True

    token_id: int  # in prompts, for each embedding, in place of `token`
    edge: int
    tokens: int  # of the prompt for each picture
    scaling: Scaling
    resample: int  # Pillow's number of the filter
    work: EncoderWork | None = None  # None: unknown
    mark: str = "<start_of_image>"  # what the chat template writes for a picture
    token: str = "<image_soft_token>"  # noqa: S105  (no password)
    end: str = "<end_of_image>"

    def scaled(self, size: Size) -> Size:
        return Size(self.edge, self.edge)

    def num_tokens(self, size: Size) -> int:
        return self.tokens

    def text(self, size: Size) -> str:
        return f"\n\n{self.mark}{self.token * self.tokens}{self.end}\n\n"

    def position_grid(self, size: Size) -> tuple[int, int] | None:
        """Return None: the prompt's positions are as of words."""
        return None


class FixedForm(msgspec.Struct, frozen=True, tag=True):
    """Gemma 3n: a picture becomes a square, whatever its shape, and as many tokens as any other.

    Example: an edge of 768; 1600 x 900 pixels become 768 x 768, and 256 tokens and an end mark, whose embedding the
    encoder has as well.
    """

    is_whole: ClassVar[bool] = False  # the tokens of a picture are computed in one pass, and read one another

    token_id: int  # in prompts, for each embedding, in place of `mark`
    edge: int
    tokens: int  # of the prompt for each picture, the end mark included
    scaling: Scaling
    resample: int  # Pillow's number of the filter
    work: EncoderWork | None = None  # None: unknown
    mark: str = "<image_soft_token>"  # what the template writes for a picture, and each of its tokens
    start: str = "<start_of_image>"

    def scaled(self, size: Size) -> Size:
        return Size(self.edge, self.edge)

    def num_tokens(self, size: Size) -> int:
        return self.tokens

    def text(self, size: Size) -> str:
        return f"\n\n{self.start}{self.mark * self.tokens}\n\n"

    def position_grid(self, size: Size) -> tuple[int, int] | None:
        """Return None: the prompt's positions are as of words."""
        return None


class BudgetForm(msgspec.Struct, frozen=True, tag=True):
    """Gemma 4: a picture keeps its shape, and is made as large as a number of tokens allows.

    Example: cells of 48 and at most 280 of them; 1600 x 900 pixels become 1056 x 576, 12 rows of 22 cells.
    """

    token_id: int  # in prompts, for each embedding, as `mark`
    cell_edge: int  # of patches joined to one token
    max_tokens: int  # of the prompt for a picture
    scaling: Scaling
    resample: int  # Pillow's number of the filter
    work: EncoderWork | None = None  # None: unknown
    mark: str = "<|image|>"
    start: str = "<|image>"
    end: str = "<image|>"
    is_whole: bool = False  # the tokens of a picture are computed in one pass, and read one another

    def scaled(self, size: Size) -> Size:
        """Return the size that the picture is made: whole cells."""
        columns, rows = self.grid(size)
        return Size(columns * self.cell_edge, rows * self.cell_edge)

    def grid(self, size: Size) -> Size:
        edge, pixels = self.cell_edge, size.width * size.height
        factor = math.sqrt(self.max_tokens * edge**2 / pixels)
        columns, rows = (math.floor(factor * length / edge) for length in size)
        if not rows:
            return Size(min(math.floor(size.width / size.height), self.max_tokens), 1)
        if not columns:
            return Size(1, min(math.floor(size.height / size.width), self.max_tokens))
        return Size(columns, rows)

    def num_tokens(self, size: Size) -> int:
        columns, rows = self.grid(size)
        return columns * rows

    def text(self, size: Size) -> str:
        return f"{self.start}{self.mark * self.num_tokens(size)}{self.end}"

    def position_grid(self, size: Size) -> tuple[int, int] | None:
        """Return None: the prompt's positions are as of words."""
        return None


PictureForm = TiledForm | RowsForm | CellsForm | SquareForm | FixedForm | CanvasForm | BudgetForm
