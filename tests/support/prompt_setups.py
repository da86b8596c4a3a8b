"""Engines, of a few small blocks, whose prompts and chunks a library might compute."""

from alignedserve.core.block_layout import BlockLayout
from alignedserve.runtime.attention.libraries import CheckShapes, ChunkShape, PromptSetup

ODD_WHOLE, ODD_CHUNKS = ChunkShape((1, 9, 5), (1, 9, 5)), ChunkShape((11, 6, 1), (5, 1, 1))
SHAPES = CheckShapes(ODD_WHOLE, ODD_CHUNKS, ChunkShape((9, 4), (9, 4)), ChunkShape((11, 6), (5, 6)))
WINDOW = 4


def layout(block_size: int = 4, dtype: str = "bfloat16") -> BlockLayout:
    return BlockLayout(block_size=block_size, num_layers=2, num_kv_heads=2, head_dim=16, dtype=dtype)


def setup_of(window: int | None = None, dtype: str = "float32", block_size: int = 4) -> PromptSetup:
    return PromptSetup("cpu", layout(block_size, dtype), 40, 2, window, SHAPES)
