"""Feed-forward parts: mixtures of experts against loops over tokens in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from kernels.cpu.expert_products import native_experts
from kernels.cpu.packed_linear import Int8Linear
from kernels.feed_forward import ExpertRouter, Experts, FeedForwardPart, GroupRouter, grouped_products
from kernels.grouped_linear import ExpertWeights, stacked_experts
from kernels.linear import Linear
from tests.support.devices.host_reads import NoHostReads
from tests.support.marks import each

HIDDEN, INNER = 24, 16


def randoms(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


class Counted:
    """A product that notes its calls."""

    in_width = HIDDEN

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.out_width = len(weight)
        self.num_calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        assert len(x), "no product of no rows"
        return x @ self.weight.T


@given(
    num_experts=st.integers(1, 9), num_rows=st.integers(1, 20), chosen=st.integers(1, 9), seed=st.integers(0, 1 << 30)
)
def test_every_row_meets_its_experts_and_every_expert_is_called_once(
    num_experts: int, num_rows: int, chosen: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    chosen = min(chosen, num_experts)
    experts = torch.rand(num_rows, num_experts, generator=generator).argsort(1)[:, :chosen]
    products = [Counted(randoms(5, HIDDEN, seed=index)) for index in range(num_experts)]
    x = randoms(num_rows, HIDDEN, seed=seed)
    results = grouped_products(x, experts, products)
    weights = torch.stack([product.weight for product in products]).double()
    expected = torch.einsum("rcoi,ri->rco", weights[experts], x.double())
    torch.testing.assert_close(results.double(), expected, rtol=0.0, atol=1e-4)
    assert all(product.num_calls == int((experts == index).any()) for index, product in enumerate(products))


def expected_mixture(x: Tensor, weights: tuple[Tensor, Tensor, Tensor], chosen: int, *, normalises: bool) -> Tensor:
    """Compute token by token, in float64."""
    router, gate_up, down = (weight.double() for weight in weights)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, own in enumerate(x.double()):
        shares, indices = torch.softmax(router @ own, dim=0).topk(chosen)
        shares = shares / shares.sum() if normalises else shares
        for share, index in zip(shares, indices.tolist(), strict=True):
            gate, up = (gate_up[index] @ own).chunk(2)
            out[row] += share * (down[index] @ (functional.silu(gate) * up))
    return out


def weights_of(num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    gate_up, down = randoms(num_experts, 2 * INNER, HIDDEN), randoms(num_experts, HIDDEN, INNER)
    return randoms(num_experts, HIDDEN, seed=7), gate_up * 0.3, down * 0.3


def packed(weights: tuple[Tensor, Tensor, Tensor], chosen: int, *, normalises: bool) -> Experts:
    parts = [
        FeedForwardPart(Linear(gate_up, activation="silu", is_gated=True), Linear(down))
        for gate_up, down in zip(*weights[1:], strict=True)
    ]
    return Experts(ExpertRouter(weights[0], chosen, normalises=normalises), parts)


@each("normalises", [True, False])
@each(("num_experts", "chosen"), [(1, 1), (5, 2), (16, 4)])
@each("num_rows", [1, 9, 300])
def test_mixtures(num_rows: int, num_experts: int, chosen: int, normalises: bool) -> None:
    """As on a CPU, and as on a GPU where no kernel runs, which nothing makes wait for the routing."""
    weights, x = weights_of(num_experts), randoms(num_rows, HIDDEN)
    expected = expected_mixture(x, weights, chosen, normalises=normalises)
    router, gate_up, down = weights
    chooses = ExpertRouter(router, chosen, normalises=normalises)
    stacked = stacked_experts(chooses, ExpertWeights(gate_up), ExpertWeights(down), "silu")
    with NoHostReads():  # type: ignore[no-untyped-call]
        stacked(x)
    for mixture in (packed(weights, chosen, normalises=normalises), stacked):
        before = x.clone()
        assert (mixture.in_width, mixture.out_width) == (HIDDEN, HIDDEN)
        torch.testing.assert_close(mixture(x).double(), expected, rtol=0.0, atol=1e-5)
        assert torch.equal(x, before)


def test_rows_that_are_not_numbers_stay_alone() -> None:
    """The engine fails the request with the NaN, not those beside it."""
    mixture, x = packed(weights_of(8), 3, normalises=True), randoms(5, HIDDEN)
    expected = mixture(x)
    x[2] = float("nan")
    found = mixture(x)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], expected[others])


def test_the_shares_of_a_row_do_not_depend_on_its_batch() -> None:
    """Sigmoids of PyTorch would: in the last bit, by where in the batch a row's scores stand."""
    router = GroupRouter(randoms(6, HIDDEN), randoms(6, seed=1), 2, normalises=True, groups=(3, 2))
    x = randoms(37, HIDDEN, seed=2)
    experts, shares = router(x)[:2]
    alone = [router(x[place : place + 1]) for place in range(len(x))]
    assert torch.equal(experts, torch.cat([one[0] for one in alone]))
    assert torch.equal(shares, torch.cat([one[1] for one in alone]))


@pytest.mark.parametrize("kind", [Linear, Int8Linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_one_call_give_the_same_bits(kind: type[Linear] | type[Int8Linear], dtype: torch.dtype) -> None:
    weights = [(randoms(2 * INNER, HIDDEN, seed=expert), randoms(HIDDEN, INNER, seed=expert)) for expert in range(5)]
    experts = [
        FeedForwardPart(kind(first.to(dtype), activation="silu", is_gated=True), kind(second.to(dtype)))
        for first, second in weights
    ]
    native = native_experts(experts, HIDDEN, HIDDEN)
    if native is None:
        pytest.skip("the native kernels are not built")
    for num_rows in (1, 40):
        x = randoms(num_rows, HIDDEN).to(dtype)
        chosen = randoms(num_rows, 4, seed=7).topk(2).indices  # the last expert has no row
        assert torch.equal(grouped_products(x, chosen, experts, native=native), grouped_products(x, chosen, experts))
