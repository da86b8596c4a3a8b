"""Sampling: each parameter's effect, distributions, and independence of what shares the batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from alignedserve.core.ids import RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.attention.sequence_table import NewSequence
from alignedserve.runtime.device.arrays import Array, to_device
from alignedserve.runtime.engine.sampling import logits_processors
from alignedserve.runtime.engine.sampling.sampler import Choice, Sampler, logprob_entries
from kernels.sampling import Filters, Penalties, SeenTokens, greedy, penalise_, sample, uniforms
from tests.support.kernel_reference import kept_tokens, penalised
from tests.support.marks import each

VOCABULARY = 12
EOS = 2


def random_logits(rows: int, vocabulary: int = VOCABULARY, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2.0


def choose(
    params: SamplingParams, logits: Tensor, prompt: tuple[int, ...] = (3,), generated: tuple[int, ...] = ()
) -> Choice:
    sampler = Sampler(max_sequences=4, vocab_size=logits.shape[1], eos_token_ids=(EOS,))
    tokens = prompt + generated
    sampler.add(1, NewSequence(RequestId("a"), tokens, len(prompt), 0, (), params))
    return sampler.choose(np.array([1]), np.array([len(tokens)]), logits)


def frequencies(params: SamplingParams, logits: Tensor, draws: int) -> Tensor:
    """Return the share of each token over many positions of one request."""
    many = logits.expand(draws, -1)
    filters = Filters(
        torch.full((draws,), params.top_k), torch.full((draws,), params.top_p), torch.full((draws,), params.min_p)
    )
    positions = uniforms(np.full(draws, params.seed or 0), np.arange(draws))
    token_ids, is_usable = sample(many / params.temperature, filters, torch.from_numpy(positions))
    assert is_usable.all()
    return torch.bincount(token_ids, minlength=logits.shape[1]) / draws


@each(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, seed=5),
        SamplingParams(temperature=2.0, seed=-1),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.6),
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=5, top_p=0.7, min_p=0.05, temperature=1.5),
        SamplingParams(top_k=1),
    ],
)
def test_distribution(params: SamplingParams) -> None:
    logits = random_logits(1)
    draws = 20000
    probabilities = torch.softmax(logits[0].double() / params.temperature, dim=0)
    kept = kept_tokens(probabilities.tolist(), params.top_k, params.top_p, params.min_p)
    expected = torch.zeros(VOCABULARY, dtype=torch.float64)
    expected[list(kept)] = probabilities[list(kept)]
    expected /= expected.sum()
    observed = frequencies(params, logits, draws).double()
    assert set(observed.nonzero().flatten().tolist()) <= kept
    deviation = ((observed - expected) ** 2 / expected.clamp(min=1e-12))[expected > 0].sum() * draws
    # Chi-square with at most 11 degrees of freedom: 40 is beyond the 99.99th percentile.
    assert float(deviation) < 40.0


@pytest.mark.parametrize(
    ("logits", "settings"),
    [
        (
            random_logits(6, vocabulary=1000, seed=3) * 0.2,
            [(0, 0.99, 0.0), (700, 1.0, 0.0), (0, 1.0, 0.05), (900, 0.9, 0.01), (3, 0.5, 0.5), (0, 0.05, 0.0)],
        ),
        # As steep as a text's: what the filters leave out beyond the first candidates has much of the whole weight.
        (
            -1.5 * (torch.arange(8000.0) + 2.0).log().repeat(6, 1),
            [(300, 0.9, 0.0), (0, 0.9, 0.0003), (256, 0.95, 0.0), (1000, 0.8, 0.001), (0, 0.8, 0.0), (2, 0.9, 0.0)],
        ),
    ],
    ids=["flat", "steep"],
)
def test_filters_agree_with_the_reference_beyond_the_first_candidates(
    logits: Tensor, settings: list[tuple[int, float, float]]
) -> None:
    filters = Filters(*(torch.tensor(column) for column in zip(*settings, strict=True)))
    chosen: list[set[int]] = [set() for _ in settings]
    for draw in np.linspace(0.0, 1.0 - 1e-9, 400):
        token_ids, _ = sample(logits, filters, torch.full((6,), float(draw), dtype=torch.float64))
        for row, token_id in enumerate(token_ids.tolist()):
            chosen[row].add(token_id)
    for row, (top_k, top_p, min_p) in enumerate(settings):
        kept = kept_tokens(torch.softmax(logits[row].double(), 0).tolist(), top_k, top_p, min_p)
        assert chosen[row] <= kept
        assert len(chosen[row]) > 0.2 * len(kept)


def test_rows_do_not_depend_on_each_other() -> None:
    logits = random_logits(40, vocabulary=2000)
    generator = torch.Generator().manual_seed(1)
    filters = Filters(
        torch.randint(0, 50, (40,), generator=generator) * (torch.arange(40) % 3 == 0),
        torch.where(torch.arange(40) % 2 == 0, 0.99, 1.0),
        torch.where(torch.arange(40) % 5 == 0, 0.01, 0.0),
    )
    draws = torch.from_numpy(uniforms(np.arange(40), np.arange(40)))
    together, _ = sample(logits, filters, draws)
    for row in range(40):
        own = Filters(*(column[row : row + 1] for column in filters))
        assert sample(logits[row : row + 1], own, draws[row : row + 1])[0].item() == together[row].item()


def test_uniforms_are_uniform_and_depend_on_seed_and_position() -> None:
    draws = uniforms(np.repeat(np.arange(-50, 50), 100), np.tile(np.arange(100), 100))
    assert 0.0 <= draws.min() < draws.max() < 1.0
    counts, _ = np.histogram(draws, bins=20, range=(0.0, 1.0))
    assert ((counts - 500.0) ** 2 / 500.0).sum() < 50.0
    assert len(np.unique(draws)) == len(draws)
    assert uniforms(np.array([-(1 << 63), (1 << 63) - 1]), np.array([0, 1])).shape == (2,)


def test_the_smallest_temperatures_draw_the_likeliest() -> None:
    logits = 30.0 * random_logits(1)
    for temperature in (1e-20, 1e-40):  # the inverse of the second is more than float32 holds
        choice = choose(SamplingParams(temperature=temperature, seed=3), logits)
        assert choice.is_usable.all()
        assert choice.token_ids.item() == logits.argmax()


def test_greedy_takes_the_first_maximum_and_ignores_the_seed() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    assert choose(SamplingParams(temperature=0.0, seed=4), logits, prompt=(1,)).token_ids.tolist() == [1]


def test_rows_that_are_not_numbers_are_not_usable() -> None:
    logits = random_logits(4)
    logits[0, 3], logits[1, 0], logits[2] = float("nan"), float("inf"), float("-inf")
    _, is_usable = greedy(logits)
    assert is_usable.tolist() == [False, False, False, True]
    filters = Filters(torch.tensor([0, 2, 0, 2]), torch.ones(4), torch.zeros(4))
    token_ids, is_usable = sample(logits, filters, torch.full((4,), 0.5, dtype=torch.float64))
    assert is_usable.tolist() == [False, False, False, True]
    assert 0 <= int(token_ids.min()) <= int(token_ids.max()) < VOCABULARY


def test_penalties_against_the_reference() -> None:
    prompt, generated = [1, 4, 4, 7], [7, 7, 2, 9]
    logits = random_logits(3)
    token_ids = torch.tensor([1, 4, 7, 2, 9])
    counts = torch.tensor([generated.count(token_id) for token_id in token_ids.tolist()], dtype=torch.int32)
    columns = (1.7, 0.6, -0.4), (0.8, -1.0, 0.0)
    expected = [penalised(logits[row + 1].tolist(), prompt, generated, *columns[row]) for row in range(2)]
    untouched = logits[0].tolist()
    rows = torch.tensor([1] * 5 + [2] * 5)
    seen = SeenTokens(rows, token_ids.repeat(2), counts.repeat(2))
    penalise_(logits, seen, Penalties(*(torch.tensor([9.0, *column]) for column in zip(*columns, strict=True))))
    assert logits[0].tolist() == untouched
    for row in range(2):
        assert logits[row + 1].tolist() == pytest.approx(expected[row], abs=1e-6)


def test_penalties_count_what_was_generated_so_far() -> None:
    """Equal logits and a frequency penalty: every token once before any comes twice, as resumed as in one go."""
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0, max_tokens=30)
    logits = torch.zeros(1, VOCABULARY)
    sampler = Sampler(max_sequences=4, vocab_size=VOCABULARY, eos_token_ids=(EOS,))
    sampler.add(2, NewSequence(RequestId("a"), (3, 0, 1), 1, 0, (), params))
    chosen = [int(sampler.choose(np.array([2]), np.array([3 + step]), logits).token_ids[0]) for step in range(10)]
    assert chosen == list(range(2, VOCABULARY))


def test_logit_bias_forces_and_forbids() -> None:
    logits = random_logits(1)
    assert choose(SamplingParams(temperature=0.0, logit_bias=((5, 100.0),)), logits).token_ids.tolist() == [5]
    best = int(logits.argmax())
    biased = choose(SamplingParams(temperature=0.0, logit_bias=((best, -100.0), (10**6, 5.0))), logits)
    assert biased.token_ids.tolist() != [best]


def test_only_allowed_tokens_are_chosen() -> None:
    logits = random_logits(1)
    order = logits[0].argsort(descending=True).tolist()
    allowed = SamplingParams(temperature=0.0, allowed_token_ids=(order[4], order[2], 10**6))
    assert choose(allowed, logits).token_ids.tolist() == [order[2]]
    drawn = {int(choose(replace(allowed, temperature=2.0, seed=seed), logits).token_ids[0]) for seed in range(40)}
    assert drawn == {order[2], order[4]}


def test_thousands_of_allowed_tokens_cost_a_step_no_more_than_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes: list[int] = []

    def noted(arrays: list[Array], device: torch.device) -> list[Tensor]:
        num_bytes.append(sum(array.nbytes for array in arrays))
        return to_device(arrays, device)

    monkeypatch.setattr(logits_processors, "to_device", noted)
    logits = random_logits(1, vocabulary=50_000)
    for num_allowed in (3, 49_000):
        choose(SamplingParams(temperature=0.0, allowed_token_ids=tuple(range(num_allowed))), logits)
    assert num_bytes[0] == num_bytes[1] < 10_000


def test_bad_words_are_never_completed_however_far_an_answer_was_when_it_resumed() -> None:
    words = ((5,), (7, 8), (7, 7, 9), (8, 7, 7, 3))
    params = SamplingParams(temperature=1.5, bad_words=words, max_tokens=400, seed=3)
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [3, 7, 8, 9]] = 2.0
    generated: list[int] = []
    for resumed_at in range(0, 400, 57):
        sampler = Sampler(max_sequences=1, vocab_size=VOCABULARY, eos_token_ids=(EOS,))
        sampler.add(0, NewSequence(RequestId("a"), (7, *generated), 1, 0, (), params))
        for step in range(57):
            choice = sampler.choose(np.array([0]), np.array([1 + resumed_at + step]), logits)
            generated.append(int(choice.token_ids[0]))
    found = [word for word in words for at in range(400) if tuple(generated[at : at + len(word)]) == word]
    assert found == []
    assert {3, 7, 8, 9} <= set(generated)
    once = choose(SamplingParams(temperature=0.0, bad_words=((7, 8),)), logits.index_fill(1, torch.tensor([8]), 9.0))
    assert once.token_ids.tolist() == [8]  # the prompt's end does not begin a bad word


def test_rows_with_and_without_limits_share_a_step() -> None:
    sampler = Sampler(max_sequences=4, vocab_size=VOCABULARY, eos_token_ids=(EOS,))
    kinds = [
        SamplingParams(temperature=0.0, allowed_token_ids=(4,)),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, bad_words=((0,), (1,)), min_tokens=1, stop_token_ids=(2,)),
        SamplingParams(temperature=0.0, allowed_token_ids=(6, 7), bad_words=((6,),)),
    ]
    for row, params in enumerate(kinds):
        sampler.add(row, NewSequence(RequestId(f"r{row}"), (3,), 1, 0, (), params))
    choice = sampler.choose(np.arange(4), np.ones(4, np.int64), torch.zeros(4, VOCABULARY))
    first_free = next(token_id for token_id in range(VOCABULARY) if token_id not in (0, 1, 2, EOS))
    assert choice.token_ids.tolist() == [4, 0, first_free, 7]


def test_ranks_are_places_in_the_whole_vocabulary() -> None:
    logits = random_logits(1)
    order = logits[0].argsort(descending=True).tolist()
    forced = SamplingParams(temperature=0.0, allowed_token_ids=(order[7],), num_logprobs=2)
    assert choose(forced, logits).logprobs[0].rank == 8


def test_which_of_equal_tokens_are_named_does_not_depend_on_who_else_asks() -> None:
    """Ties are common in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        logits = (torch.randn(2, 322, generator=generator) * 0.2 + 3.0).bfloat16().float()
        token_ids = torch.tensor([5, 5])
        (alone,) = logprob_entries(logits[:1], token_ids[:1], [1])
        assert logprob_entries(logits, token_ids, [1, 3])[0].top == alone.top


def test_min_tokens_masks_every_stop_token_until_reached() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, EOS], logits[0, 5] = 10.0, 9.0
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(5,))
    assert choose(params, logits, generated=(7,)).token_ids.tolist() == [0]
    assert choose(params, logits, generated=(7, 7)).token_ids.tolist() == [EOS]
    ignoring = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(5,), ignore_eos=True)
    assert choose(ignoring, logits).token_ids.tolist() == [EOS]


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_logits(1)
    params = SamplingParams(temperature=0.3, logit_bias=((5, 100.0),), num_logprobs=4)
    entry = choose(params, logits).logprobs[0]
    expected = torch.log_softmax(logits[0], dim=0)
    assert entry.token_id == 5
    assert entry.logprob == pytest.approx(float(expected[5]), abs=1e-6)
    assert [token_id for token_id, _ in entry.top] == expected.topk(4).indices.tolist()
    assert choose(SamplingParams(num_logprobs=0), logits).logprobs[0].top == ()
    assert choose(SamplingParams(), logits).logprobs == {}
