"""Mixtures of experts by the kernels: choices, sorted rows, products and sums, and nothing that the host reads."""

import pytest
import torch
from torch import Tensor

from kernels import gpu_dispatch
from kernels.feed_forward import ExpertRouter
from kernels.grouped_linear import ExpertWeights, StackedProduct, has_grouped_products, rows_by_expert, stacked_experts
from tests.support.devices.host_reads import NoHostReads
from tests.support.marks import slow

pytest.importorskip("triton")

from kernels.gpu import expert_rows, stacked_weights

pytestmark = pytest.mark.slow

# Of one rounding, relative; Triton's interpreter cuts bfloat16 off where a GPU rounds.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_dispatch, "wants_fused_kernels", lambda device: True)


def randoms(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize(("num_rows", "num_experts", "chosen"), [(5, 6, 2), (1, 1, 1), (3, 128, 8), (2, 4, 4)])
def test_choices(num_rows: int, num_experts: int, chosen: int, normalises: bool, device: torch.device) -> None:
    logits = randoms(num_rows, num_experts)
    expected, indices = torch.softmax(logits, dim=1).topk(chosen, dim=1)
    expected = expected / expected.sum(1, keepdim=True) if normalises else expected
    experts, shares = expert_rows.choose(logits.to(device), chosen, normalises=normalises)
    assert experts.tolist() == indices.tolist()
    torch.testing.assert_close(shares.cpu(), expected, rtol=1e-5, atol=1e-7)


def test_of_equal_experts_the_first_are_chosen_and_no_number_spoils_its_row_alone(device: torch.device) -> None:
    logits = torch.zeros(3, 6)
    logits[1, 2], logits[2, 4] = float("nan"), 1.0
    experts, shares = expert_rows.choose(logits.to(device), 3, normalises=True)
    assert experts[0].tolist() == [0, 1, 2]
    assert experts[2].tolist() == [4, 0, 1]
    assert shares[1].isnan().all()
    assert not shares[[0, 2]].isnan().any()
    assert 0 <= int(experts.min()) <= int(experts.max()) < 6


@pytest.mark.parametrize(("num_rows", "num_experts", "chosen"), [(1, 4, 2), (7, 5, 5), (700, 3, 2)])
def test_sorted_rows(num_rows: int, num_experts: int, chosen: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    experts = torch.rand(num_rows, num_experts, generator=generator).argsort(1)[:, :chosen]
    expected = rows_by_expert(experts, num_experts)
    rows, places, ends = expert_rows.sort(experts.int().to(device), num_experts)
    assert rows.tolist() == expected.rows.tolist()
    assert places.tolist() == expected.places.tolist()
    assert ends.tolist() == expected.ends.tolist()
    assert expected.experts.tolist() == experts.flatten().sort().values.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *slow(torch.float16)])
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "columns", "width"), [(1, 4, 70, 64), (40, 3, 16, 72), (150, 2, 130, 16)]
)
def test_products(
    num_rows: int, num_experts: int, columns: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Experts without rows hold no numbers: nothing of theirs may be read."""
    experts = torch.randint(1, num_experts, (num_rows, 1), generator=torch.Generator().manual_seed(3))
    rows = rows_by_expert(experts, num_experts)
    weight = randoms(num_experts, columns, width).to(dtype)
    weight[[expert for expert in range(num_experts) if expert not in experts]] = float("nan")
    x = randoms(num_rows, width + 8).to(dtype)[:, 4:-4]
    found = stacked_weights.multiply_sorted(x.to(device), weight.to(device), rows.ends.to(device)).double().cpu()
    own = weight[experts.flatten().sort().values].double()
    expected = torch.einsum("rci,ri->rc", own, x.double())
    size = torch.einsum("rci,ri->rc", own.abs(), x.double().abs())
    assert ((found - expected).abs() <= 2 * ROUNDING[dtype] * (expected.abs() + 1.0) + 1e-6 * size).all()


@pytest.mark.parametrize("num_rows", [1, 512])
def test_a_mixture_waits_for_nothing(num_rows: int, device: torch.device) -> None:
    """512 rows: the largest step that is recorded as a graph."""
    num_experts, hidden, inner = 8, 32, 16
    router = ExpertRouter(randoms(num_experts, hidden).to(device), 2, normalises=True)
    gate_up, down = randoms(num_experts, 2 * inner, hidden).to(device), randoms(num_experts, hidden, inner).to(device)
    mixture, x = (
        stacked_experts(router, ExpertWeights(gate_up), ExpertWeights(down), "silu"),
        randoms(num_rows, hidden).to(device),
    )
    with NoHostReads():  # type: ignore[no-untyped-call]
        found = mixture(x)
    routing = router(x)
    expected = torch.zeros(num_rows, hidden, dtype=torch.float64)
    for row, (experts, shares) in enumerate(zip(routing.experts.tolist(), routing.shares.tolist(), strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            gate, up = (gate_up[expert].double().cpu() @ x[row].double().cpu()).chunk(2)
            expected[row] += share * (down[expert].double().cpu() @ (gate * gate.sigmoid() * up))
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "expected"),
    [
        ((9, 0), torch.bfloat16, 64, True),
        ((10, 0), torch.bfloat16, 64, True),
        ((8, 0), torch.bfloat16, 64, False),
        ((12, 0), torch.bfloat16, 64, False),
        ((9, 0), torch.float16, 64, False),
        ((9, 0), torch.bfloat16, 60, False),
    ],
)
def test_the_library_is_used_where_it_does_not_read_on_the_host(
    capability: tuple[int, int], dtype: torch.dtype, width: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnAGpu:
        device, shape = torch.device("cuda"), torch.Size((2, 64, width))

        def __init__(self) -> None:
            self.dtype = dtype

        def element_size(self) -> int:
            return 2

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("kernels.grouped_linear.can_launch", lambda name, trial: True)
    assert has_grouped_products(OnAGpu()) is expected  # type: ignore[arg-type]


def test_the_library_computes_the_same(device: torch.device) -> None:
    """On a CPU by its own loop: its layouts and its ends of rows are those that a GPU takes."""
    rows = rows_by_expert(torch.tensor([[2], [0], [2]], device=device), 4)
    product = StackedProduct(ExpertWeights(randoms(4, 24, 16).to(device, torch.bfloat16)))
    x = randoms(3, 16).to(device, torch.bfloat16)
    expected = product(x, rows)
    product._has_library = True
    torch.testing.assert_close(product(x, rows), expected, rtol=2.0**-7, atol=2.0**-7)
