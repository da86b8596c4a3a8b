"""Requests that share blocks, over random histories: every token is what the request generates alone."""

import random
from collections.abc import Callable

import pytest

from alignedserve.core.request import Request, SampledToken
from alignedserve.runtime.engine.forward.decoder import Decoder
from tests.harnesses.shared_blocks import Counts, SharingWorker, generated_alone, request_of, run_history
from tests.support.devices.checked_streams import CheckedStreams
from tests.support.marks import many, slow
from tests.support.models.tiny_engines import tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

Alone = Callable[[Request], list[SampledToken]]
NUM_HISTORIES, NUM_SLOW_HISTORIES = 6, many(300)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("llama_mha")
    make_tiny_model(folder, "llama_mha")
    return tiny_decoder(folder)


@pytest.fixture(scope="module")
def alone(decoder: Decoder) -> Alone:
    return generated_alone(decoder)


def check_history(decoder: Decoder, alone: Alone, seed: int) -> Counts:
    rng = random.Random(seed)
    made = SharingWorker(decoder, CheckedStreams, seed, host_tokens=rng.choice((60, 12, 0)))
    requests = [request_of(number, rng) for number in range(30)]
    finished = run_history(made, requests, rng)
    for request in requests:
        tokens, expected = made.tokens.get(request.request_id, []), alone(request)
        assert [one.token_id for one in tokens] == [one.token_id for one in expected[: len(tokens)]], request
        assert request.request_id not in finished or len(tokens) == len(expected)
    made.check_nothing_is_held()
    return made.counts


@pytest.mark.parametrize("num_histories", [NUM_HISTORIES, *slow(NUM_SLOW_HISTORIES)])
def test_who_shares_a_block_generates_what_it_generates_alone(
    decoder: Decoder, alone: Alone, num_histories: int
) -> None:
    counts = [check_history(decoder, alone, seed) for seed in range(num_histories)]
    assert sum(one.shares for one in counts) > 20 * num_histories
    assert sum(one.checkpoints for one in counts) > 5 * num_histories
    assert sum(one.moves for one in counts) >= num_histories
