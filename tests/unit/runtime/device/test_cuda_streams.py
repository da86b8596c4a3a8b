"""The streams of a GPU, on the fake CUDA: no memory is another's before what uses it is done, whoever let go of it."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from alignedserve.runtime.device.arrays import FixedArrays, to_device
from alignedserve.runtime.device.streams import CudaStreams
from tests.support.fake_cuda import FakeCuda, fake_cuda
from tests.support.marks import each

DEVICE = torch.device("cuda", 0)
SEEDS = range(12)  # an order that shows a fault is one of two or three
FIVE, NINE = np.full(64, 5), np.full(64, 9)


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with fake_cuda(pace=0.0) as fake:
        yield fake


def seeded(fake: FakeCuda, seed: int) -> None:
    fake.machine.random.seed(seed)


def upload(numbers: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Tensor:
    (tensor,) = to_device([numbers], DEVICE)
    return tensor


@each("seed", SEEDS)
def test_inputs_of_an_operation_are_its_own_until_it_is_done(seed: int, fake: FakeCuda) -> None:
    seeded(fake, seed)
    compute, out = CudaStreams(DEVICE).stream("compute"), torch.zeros(64, dtype=torch.int64, device=DEVICE)
    compute.run(partial(out.copy_, upload(FIVE)))
    other = upload(NINE)  # as soon as nothing holds the first, it has the same memory
    compute.record().synchronize()
    assert out.tolist() == FIVE.tolist()
    assert other.tolist() == NINE.tolist()


@each("seed", SEEDS)
def test_rows_that_are_copied_out_are_their_own_until_they_are(seed: int, fake: FakeCuda) -> None:
    seeded(fake, seed)
    copies, host = CudaStreams(DEVICE).stream("copies"), torch.zeros(64, dtype=torch.int64, pin_memory=True)
    copies.copy_out(upload(FIVE), host)
    upload(NINE)
    copies.record().synchronize()
    assert host.tolist() == FIVE.tolist()


@each("seed", SEEDS)
def test_staging_memory_is_written_behind_its_former_owner(seed: int, fake: FakeCuda) -> None:
    seeded(fake, seed)
    copies, host = CudaStreams(DEVICE).stream("copies"), torch.full((64,), 5).pin_memory()
    upload(NINE)  # is on its way when its memory is given away
    staging = torch.empty(64, dtype=torch.int64, device=DEVICE)
    copies.copy_in(host, staging)
    copies.record().synchronize()
    assert staging.tolist() == FIVE.tolist()


@each("seed", SEEDS)
def test_page_locked_memory_is_refilled_when_its_copy_is_done(seed: int, fake: FakeCuda) -> None:
    seeded(fake, seed)
    fixed, seen = FixedArrays([FIVE], DEVICE, last_size=64), []
    for numbers in (FIVE, NINE, FIVE + NINE):
        fixed.fill([numbers])
        seen.append(fixed.tensors[0].clone())
    assert [tensor[0].item() for tensor in seen] == [5, 9, 14]
