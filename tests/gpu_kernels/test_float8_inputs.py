"""Inputs of products in FP8: rounded by the kernels to the same bits as by PyTorch, and once."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.quantized.layout import Computing
from alignedserve.runtime.model.weight_files import load_weights
from alignedserve.runtime.model.weights.weight_loader import leave_rounded_rows_unwritten
from kernels import gpu_dispatch
from kernels.float8_linear import Float8Linear, float8_inputs, rounded_inputs
from tests.support.marks import slow
from tests.support.models.quantized_checkpoints import FORMATS, quantize_folder
from tests.support.models.tiny_engines import LogitsProbe, random_tokens
from tests.support.models.tiny_models import make_tiny_model

pytest.importorskip("triton")

from kernels.gpu import float8_inputs as kernels
from kernels.gpu.gating import Gates
from kernels.gpu.row_norm import RowNorm

pytestmark = pytest.mark.slow

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32, torch.float16)])


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_dispatch, "wants_fused_kernels", lambda device: True)


def rows_of_all_sizes(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows from tiny to large, inside wider ones that hold NaN; the second is zeros, the third holds NaN."""
    wide = torch.full((num_rows, width + 5), float("nan"))
    sizes = 10.0 ** torch.linspace(-6, 2, num_rows)[:, None]
    wide[:, 2:-3] = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(width)) * sizes
    wide[1:2, 2:-3] = 0.0
    wide[2:3, 2] = float("nan")
    return wide.to(dtype)[:, 2:-3]


def check_rounded(found: tuple[Tensor, Tensor], x: Tensor) -> None:
    """Compare bits. Of a row that holds NaN the scale is NaN, and so all its products."""
    expected = rounded_inputs(x)
    is_number = ~expected.scales.isnan().flatten()
    values, scales = (part.cpu() for part in found)
    torch.testing.assert_close(scales, expected.scales.cpu(), rtol=0.0, atol=0.0, equal_nan=True)
    assert torch.equal(values.view(torch.uint8)[is_number], expected.values.view(torch.uint8).cpu()[is_number])


@dtypes
@pytest.mark.parametrize(("num_rows", "width"), [(7, 64), (1, 16), (4, 1000), (0, 16)])
@pytest.mark.parametrize("most", [16384, 128])
def test_rows(
    num_rows: int, width: int, most: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MOST_ELEMENTS", most)
    x = rows_of_all_sizes(num_rows, width, dtype)
    check_rounded(kernels.round_rows(x.to(device)), x)


def test_every_rounding_is_that_of_pytorch(device: torch.device) -> None:
    """All numbers of FP8, those halfway between two, and their neighbours."""
    stored = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (stored[1:] + stored[:-1]) / 2
    near = torch.cat([torch.nextafter(middles, torch.full_like(middles, end)) for end in (0.0, 1e9)])
    values = torch.cat([stored, middles, near])
    x = torch.cat([values, -values])[None]
    check_rounded(kernels.round_rows(x.to(device)), x)


@dtypes
@pytest.mark.parametrize("width", [64, 100])
def test_norms_and_gates_round_what_they_return(width: int, dtype: torch.dtype, device: torch.device) -> None:
    norm = RowNorm(torch.linspace(0.5, 2.0, width).to(device, dtype), None, 1e-5, is_rms=True)
    norm.round_results()
    x, gates = rows_of_all_sizes(5, width, dtype).to(device), rows_of_all_sizes(5, 2 * width, dtype).to(device)
    for plain, rounded in (
        (norm(x), norm(x)),
        (norm(x, x.clone()), norm(x, x.clone())),
        (Gates("silu")(gates), Gates("silu").rounding()(gates)),
    ):
        torch.testing.assert_close(plain, rounded, rtol=0.0, atol=0.0, equal_nan=True)
        check_rounded(float8_inputs(rounded), rounded.cpu())


def test_rows_that_nothing_reads_are_not_written(device: torch.device) -> None:
    weight, unread = torch.linspace(0.5, 2.0, 64).to(device), torch.full((1, 1), float("nan"), device=device)
    norm, alone = RowNorm(weight, None, 1e-5, is_rms=True), RowNorm(weight, None, 1e-5, is_rms=True)
    norm.round_results()
    alone.round_results(unread)
    gates = Gates("silu", rounds=True)
    x, wide = (torch.randn(5, width, generator=torch.Generator().manual_seed(1)).to(device) for width in (64, 128))
    residual = x.clone()
    for whole, rounded in (
        (norm(x), alone(x)),
        (norm(x, x.clone()), alone(x, residual)),
        (gates(wide), gates.rounding(unread)(wide)),
    ):
        assert rounded.shape == whole.shape
        assert rounded.isnan().all(), "whoever reads them sees it"
        for found, expected in zip(float8_inputs(rounded), float8_inputs(whole), strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(residual, x + x)


def test_a_model_rounds_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device, with_kernels: None
) -> None:
    """What attention returns is rounded by a launch of its own; norms and gates round what they return."""
    make_tiny_model(tmp_path, "llama_mha")
    quantize_folder(tmp_path, FORMATS["fp8"])
    monkeypatch.setattr(
        "alignedserve.runtime.model.quantized.source.Computing", lambda *_: Computing("cuda", "bfloat16", True)
    )
    config = read_config(tmp_path)
    weights = load_weights(tmp_path, config, torch.bfloat16, device)
    rounded_alone: list[int] = []
    round_rows = kernels.round_rows

    def noted(x: Tensor) -> tuple[Tensor, Tensor]:
        rounded_alone.append(x.shape[1])
        return round_rows(x)

    float8_inputs(torch.ones(1, 16, dtype=torch.bfloat16, device=device))  # with the trial of its kernel
    monkeypatch.setattr(kernels, "round_rows", noted)
    assert all(isinstance(product, Float8Linear) for product in weights.layer_projections)
    probe = LogitsProbe(Decoder(config, weights))
    probe.add("a", random_tokens(1, 5))
    probe.step(a=5)
    assert rounded_alone == [config.query_width] * config.num_layers
    found = probe.logits("a")
    leave_rounded_rows_unwritten(weights, config)
    again = LogitsProbe(Decoder(config, weights))
    again.add("a", random_tokens(1, 5))
    again.step(a=5)
    assert torch.equal(again.logits("a"), found)
    monkeypatch.setattr(gpu_dispatch, "wants_fused_kernels", lambda device: False)
    plain = LogitsProbe(Decoder(config, load_weights(tmp_path, config, torch.bfloat16, device)))
    plain.add("a", random_tokens(1, 5))
    plain.step(a=5)
    expected = plain.logits("a")
    assert float((found - expected).norm() / expected.norm()) < 0.1
