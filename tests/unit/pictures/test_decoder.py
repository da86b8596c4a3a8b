"""The process that decodes: what breaks it breaks nothing else, and no broken file gets through."""

import random
from contextlib import suppress

import pytest

from alignedserve.pictures.decoder import PictureDecoder, PictureError
from tests.support.models.tiny_vision import picture


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
