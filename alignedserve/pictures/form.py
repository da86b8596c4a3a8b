"""How a family of models sees pictures: what becomes of a picture's size, and what stands for it in a prompt.

A form is numbers and names alone, read once from the model's files: gateways make prompts by it, and the process that
decodes makes pixels by it.
"""

import math
from typing import ClassVar

import msgspec

from alignedserve.pictures.form_parts import EncoderWork, Scaling, Size
from alignedserve.pictures.tiled_forms import CanvasForm, TiledForm


class RowsForm(msgspec.Struct, frozen=True, tag=True):
    """Pixtral, Mistral 3: a picture keeps its shape, and is read row by row in square cells.

    Example: cells of 16 and `longest_edge` 1024; 1600 x 900 pixels become 1024 x 576, 36 rows of 64 cells, each a
    token, and behind each row one more.
    """

    is_whole: ClassVar[bool] = False  # the tokens of a picture are computed in one pass, and read one another

    token_id: int  # that stands in prompts for each embedding, in place of `mark`
    cell_edge: int  # of the patches that become one token
    longest_edge: int  # a larger picture is made smaller
    scaling: Scaling
    resample: int  # as Pillow numbers its filters
    work: EncoderWork | None = None  # None: it is not known
    mark: str = "[IMG]"
    row_end: str = "[IMG_BREAK]"
    end: str = "[IMG_END]"

    def scaled(self, size: Size) -> Size:
        """Return the size that the picture is made: whole cells."""
        columns, rows = self.grid(size)
        return Size(columns * self.cell_edge, rows * self.cell_edge)

    def grid(self, size: Size) -> Size:
        """Return the columns and rows of cells."""
        ratio = max(max(size) / self.longest_edge, 1.0)
        width, height = (max(int(edge / ratio), 1) for edge in size)
        return Size((width - 1) // self.cell_edge + 1, (height - 1) // self.cell_edge + 1)

    def num_tokens(self, size: Size) -> int:
        """Return the positions of the prompt that the picture's embeddings take."""
        columns, rows = self.grid(size)
        return columns * rows

    def text(self, size: Size) -> str:
        """Return what stands in the prompt in place of the template's mark."""
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

    token_id: int  # that stands in prompts for each embedding, as `mark`
    cell_edge: int  # of the patches that become one token
    min_pixels: int
    max_pixels: int
    scaling: Scaling
    resample: int  # as Pillow numbers its filters
    work: EncoderWork | None = None  # None: it is not known
    mark: str = "<|image_pad|>"

    def scaled(self, size: Size) -> Size:
        """Return the size that the picture is made: whole cells."""
        edge, pixels = self.cell_edge, size.width * size.height
        width, height = (round(one / edge) * edge for one in size)
        if width * height > self.max_pixels:
            beta = math.sqrt(pixels / self.max_pixels)
            width, height = (max(edge, math.floor(one / beta / edge) * edge) for one in size)
        elif width * height < self.min_pixels:
            beta = math.sqrt(self.min_pixels / pixels)
            width, height = (math.ceil(one * beta / edge) * edge for one in size)
        return Size(max(width, edge), max(height, edge))

    def num_tokens(self, size: Size) -> int:
        """Return the positions of the prompt that the picture's embeddings take."""
        rows, columns = self.position_grid(size)
        return rows * columns

    def text(self, size: Size) -> str:
        """Return what stands in the prompt in place of the template's mark."""
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

    token_id: int  # that stands in prompts for each embedding, in place of `token`
    edge: int
    tokens: int  # of the prompt for each picture
    scaling: Scaling
    resample: int  # as Pillow numbers its filters
    work: EncoderWork | None = None  # None: it is not known
    mark: str = "<start_of_image>"  # what the chat template writes for a picture
    token: str = "<image_soft_token>"  # noqa: S105  (no password)
    end: str = "<end_of_image>"

    def scaled(self, size: Size) -> Size:
        """Return the size that the picture is made."""
        return Size(self.edge, self.edge)

    def num_tokens(self, size: Size) -> int:
        """Return the positions of the prompt that the picture's embeddings take."""
        return self.tokens

    def text(self, size: Size) -> str:
        """Return what stands in the prompt in place of the template's mark."""
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

    token_id: int  # that stands in prompts for each embedding, in place of `mark`
    edge: int
    tokens: int  # of the prompt for each picture, the end mark included
    scaling: Scaling
    resample: int  # as Pillow numbers its filters
    work: EncoderWork | None = None  # None: it is not known
    mark: str = "<image_soft_token>"  # what the template writes for a picture, and each of its tokens
    start: str = "<start_of_image>"

    def scaled(self, size: Size) -> Size:
        """Return the size that the picture is made."""
        return Size(self.edge, self.edge)

    def num_tokens(self, size: Size) -> int:
        """Return the positions of the prompt that the picture's embeddings take."""
        return self.tokens

    def text(self, size: Size) -> str:
        """Return what stands in the prompt in place of the template's mark."""
        return f"\n\n{self.start}{self.mark * self.tokens}\n\n"

    def position_grid(self, size: Size) -> tuple[int, int] | None:
        """Return None: the prompt's positions are as of words."""
        return None


class BudgetForm(msgspec.Struct, frozen=True, tag=True):
    """Gemma 4: a picture keeps its shape, and is made as large as a number of tokens allows.

    Example: cells of 48 and at most 280 of them; 1600 x 900 pixels become 1056 x 576, 12 rows of 22 cells.
    """

    token_id: int  # that stands in prompts for each embedding, as `mark`
    cell_edge: int  # of the patches that become one token
    max_tokens: int  # of the prompt for a picture
    scaling: Scaling
    resample: int  # as Pillow numbers its filters
    work: EncoderWork | None = None  # None: it is not known
    mark: str = "<|image|>"
    start: str = "<|image>"
    end: str = "<image|>"
    is_whole: bool = False  # the tokens of a picture are computed in one pass, and read one another

    def scaled(self, size: Size) -> Size:
        """Return the size that the picture is made: whole cells."""
        columns, rows = self.grid(size)
        return Size(columns * self.cell_edge, rows * self.cell_edge)

    def grid(self, size: Size) -> Size:
        """Return the columns and rows of cells."""
        edge, pixels = self.cell_edge, size.width * size.height
        factor = math.sqrt(self.max_tokens * edge**2 / pixels)
        columns, rows = (math.floor(factor * own / edge) for own in size)
        if not rows:
            return Size(min(math.floor(size.width / size.height), self.max_tokens), 1)
        if not columns:
            return Size(1, min(math.floor(size.height / size.width), self.max_tokens))
        return Size(columns, rows)

    def num_tokens(self, size: Size) -> int:
        """Return the positions of the prompt that the picture's embeddings take."""
        columns, rows = self.grid(size)
        return columns * rows

    def text(self, size: Size) -> str:
        """Return what stands in the prompt in place of the template's mark."""
        return f"{self.start}{self.mark * self.num_tokens(size)}{self.end}"

    def position_grid(self, size: Size) -> tuple[int, int] | None:
        """Return None: the prompt's positions are as of words."""
        return None


PictureForm = TiledForm | RowsForm | CellsForm | SquareForm | FixedForm | CanvasForm | BudgetForm
