"""Copies of block lists and blocks of 8 bits, against plain PyTorch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.marks import slow

pytest.importorskip("triton")

from kernels import block_digests
from kernels.block_digests import listed_digests, row_digests
from kernels.cpu.block_copies import all_rows, digest_blocks
from kernels.gpu import row_digests as gpu_row_digests
from kernels.gpu.block_copies import gather_blocks, scatter_blocks
from kernels.gpu.int8_blocks import dequantise_blocks, quantise_blocks
from kernels.int8_blocks import parts_of, plain_dequantise, plain_quantise

pytestmark = pytest.mark.slow

TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 6e-2, torch.float16: 6e-3}
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32, torch.float16)])


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("block_bytes", [8, 8192, 24008])
@pytest.mark.parametrize("ids", [[], [4], [3, 0, 8, 5]])
def test_block_lists_go_to_staging_and_back(ids: list[int], block_bytes: int, device: torch.device) -> None:
    blocks = torch.randint(0, 256, (9, block_bytes), dtype=torch.uint8, device=device)
    block_ids = torch.tensor(ids, dtype=torch.int64, device=device)
    staging = torch.zeros((len(ids), block_bytes), dtype=torch.uint8, device=device)
    gather_blocks(blocks, block_ids, staging)
    assert torch.equal(staging, blocks[block_ids])
    others = torch.zeros_like(blocks)
    scatter_blocks(staging, others, block_ids)
    assert torch.equal(others[block_ids], blocks[block_ids])
    untouched = [block for block in range(9) if block not in ids]
    assert not others[untouched].any()


@dtypes
@pytest.mark.parametrize(("block_size", "width"), [(16, 200), (8, 64), (6, 130), (2, 1)])
def test_blocks_of_8_bits(block_size: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    blocks = torch.randn(7, 4, block_size, width, device=device).to(dtype)
    blocks[2] = 0
    blocks[4, :, :, 0] = 100.0  # a channel of its own scale
    ids = torch.tensor([6, 2, 4], device=device)
    rows, expected = (torch.zeros(3, 4 * (block_size + 4) * width, dtype=torch.uint8, device=device) for _ in range(2))
    quantise_blocks(blocks, ids, rows)
    plain_quantise(blocks, ids, expected)
    (rounded, ranges), (expected_rounded, expected_ranges) = (parts_of(found, blocks) for found in (rows, expected))
    assert torch.equal(ranges, expected_ranges)
    assert (rounded.int() - expected_rounded.int()).abs().max() <= 1  # a quotient half-way between two
    back, by_plain = (poisoned(7, 4, block_size, width, dtype=dtype, device=device) for _ in range(2))
    dequantise_blocks(rows, back, ids)
    plain_dequantise(rows, by_plain, ids)
    step, size = ranges[:, :, :1].float(), by_plain[ids].float().abs()
    # Triton's interpreter cuts bfloat16 off, a GPU rounds.
    rounding = size * (0.0 if dtype == torch.float32 else 2.0**-7) + 1e-5
    assert ((back[ids].float() - by_plain[ids].float()).abs() <= rounding).all()
    # Half a step, and as much again at the ends of the range, which float16 holds only to 2^-11.
    assert ((back[ids].float() - blocks[ids].float()).abs() <= 0.7 * step + size * 2.0**-11 + rounding).all()
    assert back[[0, 1, 3, 5]].isnan().all()


@pytest.mark.parametrize("quantise", [quantise_blocks, plain_quantise])
def test_what_8_bits_cannot_hold(quantise: Callable[..., None], device: torch.device) -> None:
    blocks = torch.randn(1, 2, 8, 4, device=device)
    blocks[0, 1, 5, 2] = float("nan")
    blocks[0, 0, 3, 1] = 1e30
    ids, rows = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, 96, dtype=torch.uint8, device=device)
    quantise(blocks, ids, rows)
    back = torch.zeros_like(blocks)
    plain_dequantise(rows, back, ids)
    is_nan = torch.zeros(blocks.shape, dtype=torch.bool)
    is_nan[0, 1, :, 2] = True
    assert torch.equal(back.isnan().cpu(), is_nan)
    assert back[0, 0, 3, 1] == pytest.approx(255 * 65504.0, rel=1e-3)


@pytest.mark.parametrize("width", [8, 1024, 4104, 40_008])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_digests_of_rows(count: int, width: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randint(0, 256, (count, width), dtype=torch.uint8, device=device)
    expected = digest_blocks(all_rows(rows.cpu().numpy())).tolist()
    assert [digest % (1 << 64) for digest in row_digests(rows).tolist()] == expected
    monkeypatch.setattr(block_digests, "fused_kernels", lambda *_: gpu_row_digests)
    assert [digest % (1 << 64) for digest in row_digests(rows).tolist()] == expected


@pytest.mark.parametrize("width", [8, 1024, 40_008])
@pytest.mark.parametrize("ids", [[], [4], [3, 0, 4, 1]])
def test_digests_of_listed_rows(
    ids: list[int], width: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.randint(0, 256, (5, width), dtype=torch.uint8, device=device)
    row_ids = torch.tensor(ids, dtype=torch.int64, device=device)
    expected = row_digests(rows).cpu()[ids].tolist()
    assert listed_digests(rows, row_ids).tolist() == expected
    monkeypatch.setattr(block_digests, "fused_kernels", lambda *_: gpu_row_digests)
    assert listed_digests(rows, row_ids).tolist() == expected
