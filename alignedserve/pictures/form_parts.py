"""What the forms of all families have: sizes of pictures, how pixels are scaled, and what an encoder's pass costs."""

import math
from typing import NamedTuple

import msgspec

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

    token_patches: int  # of each token of a picture
    patch_tokens: float  # what a patch costs alone
    pair_tokens: float  # what it costs for each patch that it attends to
    part_patches: int | None = None  # that attend to one another; None: all of a picture

    def num_tokens(self, num_tokens: int) -> int:
        """Return what a picture of so many tokens costs."""
        patches = num_tokens * self.token_patches
        seen = patches if self.part_patches is None else min(self.part_patches, patches)
        return math.ceil(patches * (self.patch_tokens + seen * self.pair_tokens))
