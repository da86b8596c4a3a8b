"""Launches of Triton's kernels on the fake CUDA: what a GPU would not take is refused, the rest is done in its turn."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.fake_cuda import FakeCuda, fake_cuda
from tests.support.fake_cuda.kernels import LaunchRefused
from tests.support.marks import each

pytest.importorskip("triton")

import triton
import triton.language as tl

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda", 0)


@triton.jit  # type: ignore[untyped-decorator]
def _double(x: Any, out: Any, COUNT: tl.constexpr) -> None:
    places = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out + places, tl.load(x + places) * 2)


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with fake_cuda(pace=0.0, num_devices=2, device_bytes=3 << 30) as fake:
        yield fake


def test_a_kernel_is_done_in_its_turn(fake: FakeCuda) -> None:
    x, out = torch.ones(32, device=DEVICE), torch.empty(32, device=DEVICE)
    _double[(2,)](x, out, COUNT=16)
    x.zero_()
    assert out.tolist() == [2.0] * 32
    assert fake.machine.counts.names["_double"] == 1
    assert not fake.unaligned


@each("number", range(6))
def test_arguments_that_a_gpu_would_not_take_are_refused(number: int, fake: FakeCuda) -> None:
    whole, out = torch.ones(64, device=DEVICE), torch.empty(32, device=DEVICE)
    cases: list[tuple[Any, Any]] = [
        (torch.ones(32), (2,)),  # of the host
        (torch.ones(32, device="cuda:1"), (2,)),
        (whole[::2], (2,)),
        (whole, (0,)),
        (whole, (2, 65536)),
        (whole, (2**31,)),
    ]
    x, grid = cases[number]
    with pytest.raises(LaunchRefused):
        _double[grid](x, out, COUNT=16)


def test_arguments_that_do_not_begin_at_16_bytes_are_noted(fake: FakeCuda) -> None:
    _double[(2,)](torch.ones(64, device=DEVICE)[1:], torch.empty(32, device=DEVICE), COUNT=16)
    assert dict(fake.unaligned) == {("_double", "x"): 1}


@triton.jit  # type: ignore[untyped-decorator]
def _copy_row(x: Any, out: Any, row: Any, stride: Any, IS_WIDENED: tl.constexpr) -> None:
    own = row.to(tl.int64) if IS_WIDENED else row
    tl.store(out, tl.load(x + own * stride))


def test_offsets_that_need_more_than_32_bits_are_refused(fake: FakeCuda) -> None:
    """Without the check, the kernel would read in front of the tensor, or elsewhere in it."""
    row, stride = 1 << 15, 1 << 16
    x = torch.empty(row * stride + 1, dtype=torch.uint8, device=DEVICE)
    x[-1:].fill_(7)
    out = torch.zeros(1, dtype=torch.uint8, device=DEVICE)
    _copy_row[(1,)](x, out, row, stride, IS_WIDENED=True)
    assert out.tolist() == [7]
    _copy_row[(1,)](x, out, row, stride, IS_WIDENED=False)
    with pytest.raises(torch.AcceleratorError, match="overflow"):
        torch.cuda.synchronize()
