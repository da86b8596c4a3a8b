"""Tokens drawn on a GPU: the kept ones, the draw, and the greedy choice against references; rows of every kind."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.sampling import Filters, RowParameters, greedy, sample, uniforms
from tests.support import kernel_reference as reference
from tests.support.kernel_reference import kept_tokens
from tests.support.marks import slow

pytest.importorskip("triton")

from kernels.gpu import token_sampling
from kernels.gpu.token_sampling import sample_tokens

pytestmark = pytest.mark.slow

LOWEST = -float("inf")
# Sums of weights that are rounded to float32 against float64.
SLACK = 1e-6


def parameters(
    settings: list[tuple[float, int, float, float]], draws: list[float] | Tensor, device: torch.device
) -> RowParameters:
    """`settings`: temperature, top_k, top_p and min_p of each row."""
    temperatures, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*settings, strict=True))
    columns = (temperatures.float(), top_k, top_p.float(), min_p.float(), torch.as_tensor(draws, dtype=torch.float64))
    return RowParameters(*(column.to(device) for column in columns))


def distribution(logits: Tensor, setting: tuple[float, int, float, float]) -> Tensor:
    """Return the distribution of one row [vocabulary] float64."""
    temperature, top_k, top_p, min_p = setting
    probabilities = torch.softmax(logits.double().cpu() / temperature, dim=0)
    # Filters are float32 on the device.
    shares = torch.tensor([top_p, min_p]).tolist()
    is_dropped = torch.ones(len(logits), dtype=torch.bool)
    is_dropped[list(kept_tokens(probabilities.tolist(), top_k, *shares))] = False
    kept = probabilities.masked_fill(is_dropped, 0.0)
    return kept / kept.sum()


def drawing_order(expected: Tensor, setting: tuple[float, int, float, float]) -> Tensor:
    """Return the ids of the tokens in which a row is drawn from."""
    is_filtered = setting[1] > 0 or setting[2] < 1.0 or setting[3] > 0.0
    return expected.argsort(descending=True, stable=True) if is_filtered else torch.arange(len(expected))


@pytest.fixture(params=[16384, *slow(4)])
def candidates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many tokens are put aside for a row: all that are kept, or too few for most."""
    monkeypatch.setattr(token_sampling, "_CANDIDATES", request.param)
    return int(request.param)


def check_every_kept_token(logits: Tensor, setting: tuple[float, int, float, float], device: torch.device) -> None:
    """Check by a draw in the middle of each one's share: no more and no fewer are kept, in their order."""
    expected = distribution(logits, setting)
    token_ids = drawing_order(expected, setting)
    own = expected[token_ids]
    token_ids, draws = token_ids[own > SLACK], (own.cumsum(0) - own / 2)[own > SLACK]
    rows = logits.to(device).expand(len(draws), -1)
    chosen, is_usable = sample_tokens(rows, parameters([setting] * len(draws), draws, device))
    assert is_usable.all()
    assert chosen.tolist() == token_ids.tolist()


@pytest.mark.parametrize(
    "setting",
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 3, 1.0, 0.0),
        (1.5, 0, 0.6, 0.0),
        (1.5, 5, 0.7, 0.05),
        *slow(
            (1.0, 0, 1.0, 0.2),
            (0.8, 7, 0.9, 0.0),
            (1.0, 1, 1.0, 0.0),
            (1.0, 0, 1e-6, 0.0),
            (1.0, 0, 1.0, 1.0),
            (1.0, 12, 1.0, 0.0),
            (1.0, 40, 0.99999, 1e-4),
            (30.0, 4, 0.5, 0.0),
        ),
    ],
)
def test_filters_keep_what_the_reference_keeps(
    setting: tuple[float, int, float, float], candidates: int, device: torch.device
) -> None:
    check_every_kept_token(torch.randn(12, generator=torch.Generator().manual_seed(1)) * 2, setting, device)


@pytest.mark.parametrize(
    "setting", [(1.0, 5, 0.8, 0.0), *slow((1.0, 3, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 0, 1.0, 0.9))]
)
def test_of_equal_tokens_the_first_are_kept(
    setting: tuple[float, int, float, float], candidates: int, device: torch.device
) -> None:
    """Ties within a tile, over its edge, and a tie of all."""
    few = torch.tensor([1.0, 2.0, 1.0, 2.0, 0.0, 1.0, 2.0, 1.0, 2.0])
    check_every_kept_token(few, setting, device)
    check_every_kept_token(torch.zeros(9), setting, device)
    wide = torch.full((4100,), LOWEST)
    wide[torch.tensor([3, 700, 4094, 4095, 4096, 4099])] = torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0, 2.0])
    check_every_kept_token(wide, setting, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *slow(torch.float16)])
@pytest.mark.parametrize("vocabulary", [1, 9001, *slow(100, 4096)])
def test_rows_of_every_kind_in_one_batch(
    vocabulary: int, dtype: torch.dtype, candidates: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    settings = [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 0.95, 0.0),
        (1.2, 50, 1.0, 0.0),
        (0.0, 5, 0.5, 0.1),
        (2.0, 0, 1.0, 0.02),
        (1.0, 300, 0.9, 0.001),
        (0.05, 20, 0.9, 0.0),
    ]
    logits = (torch.randn(len(settings), vocabulary + 3, generator=generator) * 3).to(device, dtype)[:, :vocabulary]
    columns = parameters(settings, torch.rand(len(settings), generator=generator, dtype=torch.float64), device)
    before = logits.clone()
    token_ids, is_usable = sample_tokens(logits, columns)
    assert torch.equal(logits, before)
    assert is_usable.all()
    for row, setting in enumerate(settings):
        token_id = int(token_ids[row])
        if setting[0] == 0.0:
            assert token_id == int(greedy(logits[row : row + 1].cpu())[0])
            continue
        expected = distribution(logits[row], setting)
        order = drawing_order(expected, setting)
        cumulative, at = expected[order].cumsum(0), int((order == token_id).nonzero())
        below = float(cumulative[at - 1]) if at else 0.0
        assert below < float(cumulative[at]), "a token that is not kept"
        assert below - SLACK <= float(columns.draws[row]) <= float(cumulative[at]) + SLACK


@pytest.mark.parametrize(
    "setting", [(1.0, 0, 1.0, 0.0), (0.7, 40, 0.9, 0.0), (1.3, 0, 0.8, 0.0), *slow((1.0, 0, 0.95, 0.02))]
)
def test_a_seed_draws_what_it_draws_on_a_cpu(setting: tuple[float, int, float, float], device: torch.device) -> None:
    logits = torch.randn(24, 700, generator=torch.Generator().manual_seed(4)) * 3
    draws = torch.from_numpy(uniforms(np.arange(24), np.full(24, 9)))
    columns = parameters([setting] * 24, draws, device)
    expected, _ = sample(logits / setting[0], Filters(*(column.cpu() for column in columns[1:4])), draws)
    assert sample_tokens(logits.to(device), columns)[0].tolist() == expected.tolist()


def test_the_plain_reference_draws_the_same(device: torch.device) -> None:
    settings = [(0.0, 0, 1.0, 0.0), (1.0, 9, 1.0, 0.0), (0.7, 0, 0.8, 0.0), (1.3, 20, 0.9, 0.01), (1.0, 0, 1.0, 0.0)]
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2)).to(device)
    logits[5, 3] = float("nan")
    columns = parameters([*settings, settings[1]], [0.1, 0.5, 0.9, 0.3, 0.999, 0.2], device)
    chosen, is_usable = sample_tokens(logits, columns)
    expected, is_expected_usable = reference.sample_tokens(logits, columns)
    assert is_usable.tolist() == is_expected_usable.tolist()
    assert chosen[:5].tolist() == expected[:5].tolist()


def test_greedy_rows_take_the_first_of_equals(device: torch.device) -> None:
    logits = torch.full((3, 9000), -20.0)
    logits[0, 8999], logits[1, [4096, 8000]], logits[2] = 5.0, -1.0, LOWEST
    logits[2, 4095] = -3e38
    columns = parameters([(0.0, 0, 1.0, 0.0)] * 3, [0.9] * 3, device)
    assert sample_tokens(logits.to(device), columns)[0].tolist() == [8999, 4096, 4095]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_numbers_are_not_usable(temperature: float, device: torch.device) -> None:
    logits = torch.randn(5, 5000)
    logits[0, 4500], logits[1, 0], logits[2], logits[3, :4999] = float("nan"), float("inf"), LOWEST, LOWEST
    columns = parameters([(temperature, 2, 0.9, 0.0)] * 5, [0.5] * 5, device)
    token_ids, is_usable = sample_tokens(logits.to(device), columns)
    assert is_usable.tolist() == [False, False, False, True, True]
    assert int(token_ids[3]) == 4999
    assert 0 <= int(token_ids.min()) <= int(token_ids.max()) < 5000


def test_draws_at_the_ends_and_temperatures_near_zero(device: torch.device) -> None:
    logits = torch.tensor([LOWEST, 1.0, 1.0 + 1e-6, 0.5, LOWEST]).to(device)
    settings = [(1.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1e-38, 0, 1.0, 0.0), (1e-38, 0, 0.9, 0.5), (1e30, 0, 1.0, 0.0)]
    columns = parameters(settings, [0.0, 1.0 - 2.0**-53, 0.5, 0.999, 0.999], device)
    token_ids, is_usable = sample_tokens(logits.expand(5, -1), columns)
    assert is_usable.all()
    assert token_ids.tolist() == [1, 3, 2, 2, 3]


def test_the_largest_vocabulary_is_drawn_from_to_its_end(device: torch.device) -> None:
    """All of its tokens alike, so that their sum is the largest that there is: as Gemma 3's, and twice as many."""
    vocabulary = token_sampling.MOST_TOKENS
    settings = [(1.0, 0, 1.0, 0.0), (1.0, 0, 0.999, 0.0)]
    logits = torch.zeros((2, vocabulary), dtype=torch.bfloat16, device=device)
    chosen, is_usable = sample_tokens(logits, parameters(settings, [1.0 - 2.0**-40] * 2, device))
    assert is_usable.all()
    assert chosen.tolist() == pytest.approx([vocabulary - 1, 0.999 * vocabulary - 1], abs=1)
