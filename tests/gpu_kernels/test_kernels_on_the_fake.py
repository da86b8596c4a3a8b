"""Kernels as `alignedserve gpu-check` checks them, on the fake CUDA: in blocks so far that offsets need 64 bits."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from typing_extensions import override

pytest.importorskip("triton")

from kernels import gpu_dispatch
from kernels.block_digests import listed_digests
from kernels.cache_blocks import copy_listed, gather_blocks
from kernels.gpu.blocks import BlockView
from kernels.rotary import HeadPlacement
from lab.gpu_check import kernel_errors
from tests.support.fake_cuda import FakeCuda, fake_cuda
from tests.support.marks import each

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda", 0)
MOST_32_BITS = 2**31 - 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """One whose memory is taken from the host only as it is written."""
    monkeypatch.setattr(gpu_dispatch, "wants_fused_kernels", lambda device: True)
    with fake_cuda(pace=0.0, device_bytes=20 << 30) as fake:
        yield fake


def far_rows(num_rows: int, *shape: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Return rows of this shape, and the first of the last `num_rows`: elements of these are beyond 32 bits."""
    first = MOST_32_BITS // torch.Size(shape).numel() + 1
    return torch.empty((first + num_rows, *shape), dtype=dtype, device=DEVICE), first


class FarContexts(kernel_errors._Contexts):
    """Contexts in the last blocks of a large cache."""

    @override
    def __init__(self, device: torch.device, dtype: torch.dtype, *, is_float8: bool) -> None:
        super().__init__(torch.device("cpu"), dtype, is_float8=is_float8)
        own = self.view.blocks
        blocks, first = far_rows(len(own), *own.shape[1:], dtype=own.dtype)
        blocks[first:].copy_(own.to(device))
        self.view = BlockView(blocks, 0)
        entries, *others = self.tables
        self.tables = type(self.tables)((entries + first).to(device), *(part.to(device) for part in others))


@each("is_float8", [False, True])
def test_attention_reads_blocks_however_far(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, *, is_float8: bool
) -> None:
    monkeypatch.setattr(kernel_errors, "_Contexts", FarContexts)
    monkeypatch.setattr(kernel_errors, "_LENGTHS", (1, 17, 40))
    monkeypatch.setattr(kernel_errors, "_CHUNKS", (1, 9, 20))
    torch.manual_seed(1)
    dtype = torch.bfloat16
    assert kernel_errors._decode(DEVICE, dtype, is_float8=is_float8) < kernel_errors._LIMITS[dtype]
    assert kernel_errors._prefill(DEVICE, dtype, is_float8=is_float8) < kernel_errors._LIMITS[dtype]


def test_keys_and_values_are_written_however_far(fake: FakeCuda) -> None:
    count, heads, width = 5, 2, 128
    keys, first = far_rows(count, heads * width, dtype=torch.bfloat16)
    values, _ = far_rows(count, heads * width, dtype=torch.bfloat16)
    place = HeadPlacement(4, heads, width, torch.bfloat16, DEVICE)
    fused = torch.randn(count, (4 + 2 * heads) * width).bfloat16()
    places = torch.arange(first, first + count, device=DEVICE)
    place(fused.to(DEVICE), None, None, places, keys, values)
    assert keys[first:].cpu().equal(fused[:, 4 * width : -heads * width])
    assert values[first:].cpu().equal(fused[:, -heads * width :])


def test_blocks_are_copied_and_digested_however_far(fake: FakeCuda) -> None:
    blocks, first = far_rows(3, 1 << 16, dtype=torch.uint8)
    own = torch.randint(0, 256, (3, 1 << 16), dtype=torch.uint8)
    blocks[first:].copy_(own)
    ids = torch.arange(first, first + 3, device=DEVICE)
    staging = torch.empty((3, 1 << 16), dtype=torch.uint8, device=DEVICE)
    gather_blocks(blocks, ids, staging)
    assert staging.cpu().equal(own)
    copy_listed(staging, torch.tensor([2, 0], device=DEVICE), blocks, ids[:2])
    assert blocks[first : first + 2].cpu().equal(own[[2, 0]])
    near = listed_digests(staging, torch.tensor([2, 0, 2], device=DEVICE)).cpu()
    assert listed_digests(blocks, ids).cpu().equal(near)
