"""Times of a step, and the share of slots that attention reads only because another sequence is longer."""

import pytest
import torch

from alignedserve.runtime.attention.backend import AUTO, TORCH
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.model.model_files import parse_model_config
from alignedserve.runtime.model.weight_files import load_weights
from kernels.cpu.native import supported_levels
from tests.support.models.tiny_engines import TinyEngine, random_tokens
from tests.support.models.tiny_llama import TINY_LLAMA

# In blocks of four slots, each of two times 16 floats: what a call costs that reads nothing.
CALL = (512 << 10) / (4 * 2 * 16 * 4)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    config = parse_model_config(TINY_LLAMA)
    return Decoder(config, load_weights(None, config, torch.float32))


def decoding(decoder: Decoder, *lengths: int, attention: str = AUTO) -> tuple[TinyEngine, dict[str, int]]:
    """Make an engine of sequences whose next token makes them this long; return the slices for it too."""
    tiny = TinyEngine(decoder, attention=attention)
    names = [f"s{index}" for index in range(len(lengths))]
    for name, length in zip(names, lengths, strict=True):
        tiny.add(name, random_tokens(1, length - 1, 128))
        tiny.step(**{name: length - 1})
    return tiny, dict.fromkeys(names, 1)


@pytest.mark.parametrize(
    ("lengths", "share"),
    [
        ((9,), 0.0),
        ((9, 9, 9), 0.0),
        ((9, 12), 0.0),  # as many blocks of four, with eight tokens to grow: five
        ((9, 17), 2 / (7 + 7 + CALL)),  # five blocks are read as seven
        ((9, 9, 17), 4 / (21 + CALL)),
        ((9, 17, 60, 64), 3 / (14 + 36 + 2 * CALL)),  # two buckets; 17 blocks are read as 18
        ((9, 60), 0.0),  # too different to share a bucket
    ],
)
def test_padding_is_what_a_longer_sequence_brings(decoder: Decoder, lengths: tuple[int, ...], share: float) -> None:
    tiny, slices = decoding(decoder, *lengths, attention=TORCH)
    assert tiny.step(**slices).times.padded_share == pytest.approx(share)
    assert tiny.step(**slices).times.padded_share == pytest.approx(share)  # the plan is kept


@pytest.mark.skipif(not supported_levels(), reason="the native kernels are not built")
def test_nothing_is_padded_where_blocks_are_read_in_place(decoder: Decoder) -> None:
    tiny, slices = decoding(decoder, 9, 17, 60, 64)
    assert tiny.step(**slices).times.padded_share == 0.0


def test_attention_is_part_of_the_pass(decoder: Decoder) -> None:
    tiny, slices = decoding(decoder, 9, 17)
    times = tiny.step(**slices).times
    assert 0.0 < times.attention_s < times.forward_s


def test_a_prompt_alone_has_no_padding(decoder: Decoder) -> None:
    tiny = TinyEngine(decoder)
    tiny.add("a", random_tokens(1, 30, 128))
    assert tiny.step(a=30).times.padded_share == 0.0
