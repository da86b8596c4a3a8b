"""The process that decodes: what breaks it breaks nothing else, and no broken file gets through."""

import io
import random
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from PIL import Image

from plugins.vision.decoder import Decoded, DecodingTask, PictureDecoder, PictureError
from plugins.vision.decoding import decode
from plugins.vision.forms import EncoderWork, Scaling, SquareForm
from tests.support.models.tiny_vision import picture

EDGE = 8
AS_IT_IS = SquareForm(1, EDGE, 1, Scaling(1.0, (0.0,) * 3, (1.0,) * 3), Image.Resampling.NEAREST)


def seen(image: Image.Image, file_format: str = "PNG", **options: Any) -> list[tuple[int, ...]]:
    """Return the first and the last pixel that a model sees of a picture of 8 x 8."""
    file = io.BytesIO()
    image.save(file, file_format, **options)
    outcome = decode(file.getvalue(), DecodingTask(EDGE**2, AS_IT_IS))
    assert isinstance(outcome, Decoded), outcome
    pixels = np.frombuffer(outcome.pixels, np.uint8).reshape(3, EDGE, EDGE)
    return [tuple(pixels[:, place, place].tolist()) for place in (0, -1)]


def test_what_is_transparent_is_white() -> None:
    writing = Image.new("RGBA", (EDGE, EDGE), (0, 0, 0, 0))  # black on nothing
    writing.putpixel((0, 0), (0, 0, 0, 255))
    black_on_white = [(0, 0, 0), (255, 255, 255)]
    assert seen(writing) == seen(writing.convert("LA")) == seen(writing, "WEBP", lossless=True) == black_on_white
    colours = Image.new("P", (EDGE, EDGE), 1)
    colours.putpalette([0, 0, 0, 9, 9, 9])
    colours.putpixel((0, 0), 0)
    assert seen(colours, transparency=1) == seen(colours, "GIF", transparency=1) == black_on_white
    assert seen(colours) == [(0, 0, 0), (9, 9, 9)]


def test_greys_of_16_bits_are_those_of_8() -> None:
    greys = np.full((EDGE, EDGE), 0x80FF, np.uint16)
    greys[0, 0] = 0x1234
    assert seen(Image.fromarray(greys)) == [(0x12,) * 3, (0x80,) * 3]


def test_broken_files_are_refused_and_a_lost_process_comes_back() -> None:
    decoder, rng = PictureDecoder(), random.Random(1)
    good = [picture(20, 30, file_format=name) for name in ("PNG", "JPEG", "WEBP", "GIF")]
    for file in good:
        assert decoder.size(file) == (20, 30)
        for _ in range(20):
            cut = file[: rng.randrange(1, len(file))]
            broken = bytearray(file)
            broken[rng.randrange(len(file))] ^= 1 << rng.randrange(8)
            for content in (cut, bytes(broken), rng.randbytes(99)):
                with suppress(PictureError):  # and its process goes on, or a new one
                    assert len(decoder.size(content, 10_000)) == 2
    decoder._process.kill()
    while decoder._process.is_running:
        pass
    assert decoder.size(good[0]) == (20, 30)
    with pytest.raises(PictureError, match="too many pixels"):
        decoder.size(good[0], 599)
    decoder.close()
    with pytest.raises(PictureError):
        decoder.size(good[0])


def test_patches_cost_alone_and_for_those_that_they_attend_to() -> None:
    assert EncoderWork(4, 0.5, 0.01).num_tokens(25) == 150  # 100 patches: 100 * (0.5 + 100 * 0.01)
    assert EncoderWork(4, 0.5, 0.01, part_patches=50).num_tokens(25) == 100
    assert EncoderWork(4, 0.5, 0.01, part_patches=50).num_tokens(5) == 14
