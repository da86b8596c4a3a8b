"""The streams of a GPU, on the fake CUDA: no memory is another's before what uses it is done, whoever let go of it."""

from collections.abc import Iterator
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from alignedserve.runtime.device import cuda_driver as batched_copies
from alignedserve.runtime.device.arrays import FixedArrays, to_device
from alignedserve.runtime.device.cuda_driver import RowRuns
from alignedserve.runtime.device.streams import CudaStreams
from tests.support.fake_cuda import FakeCuda, device_copies, fake_cuda
from tests.support.marks import each

DEVICE = torch.device("cuda", 0)
SEEDS = range(12)  # an order that shows a fault is one of two or three
FIVE, NINE = np.full(64, 5), np.full(64, 9)


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    batched_copies._of.cache_clear()
    with fake_cuda(pace=0.0) as fake:
        yield fake
    batched_copies._of.cache_clear()


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


# --- lists of rows, by one call of the driver


def rows_of(numbers: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Tensor:
    return upload(numbers).view(torch.uint8).view(16, 32)


def pinned_rows(value: int) -> Tensor:
    return torch.full((64,), value).pin_memory().view(torch.uint8).view(16, 32)


OWN, THERE = np.array([7, 8, 9, 2, 15, 0]), np.array([3, 4, 5, 12, 1, 0])


@each("seed", SEEDS)
def test_lists_of_rows_are_copied_while_their_memory_is_theirs(seed: int, fake: FakeCuda) -> None:
    seeded(fake, seed)
    copies, host = CudaStreams(DEVICE).stream("copies"), pinned_rows(9)
    fake.machine.counts.clear()
    copies.copy_out_runs(rows_of(FIVE), host, RowRuns.of(OWN, THERE))
    assert fake.machine.counts.names["cuMemcpyBatchAsync"] == 1
    assert fake.machine.counts.launches == 2  # of which one brings FIVE
    other = upload(NINE)  # as soon as nothing holds the first, it has the same memory
    copies.record().synchronize()
    values = host.view(torch.int64)[:, 0].tolist()
    assert values == [5 if row in THERE else 9 for row in range(16)]
    rows = other.view(torch.uint8).view(16, 32)
    copies.copy_in_runs(pinned_rows(5), rows, RowRuns.of(OWN, THERE))
    pinned_rows(3)  # likewise of the host's memory
    copies.record().synchronize()
    assert other.view(16, 4)[:, 0].tolist() == [5 if row in OWN else 9 for row in range(16)]


def test_rows_go_one_by_one_where_the_driver_takes_no_lists(fake: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    copies, host = CudaStreams(DEVICE).stream("copies"), pinned_rows(9)
    assert copies.copies_runs_at_once
    with patch.object(device_copies, "INVALID_HANDLE", 801), patch.object(type(copies._stream), "cuda_stream", 0):
        for _ in range(2):
            copies.copy_out_runs(rows_of(FIVE), host, RowRuns.of(OWN, THERE))
    copies.record().synchronize()
    assert host.view(torch.int64)[:, 0].tolist() == [5 if row in THERE else 9 for row in range(16)]
    assert caplog.text.count("copies no lists of blocks (error 801)") == 1
    assert not copies.copies_runs_at_once


def test_a_run_beyond_its_memory_is_no_copy(fake: FakeCuda) -> None:
    """The driver would copy what lies there."""
    copies = CudaStreams(DEVICE).stream("copies")
    for own, there in (([16], [0]), ([0], [16]), ([-1], [0])):
        with pytest.raises(AssertionError, match="beyond"):
            copies.copy_out_runs(rows_of(FIVE), pinned_rows(9), RowRuns.of(np.array(own), np.array(there)))


def test_no_arrays_are_no_tensors_and_no_copy(fake: FakeCuda) -> None:
    """As of a step of decodes by PyTorch's operations, which read nothing that the host has planned."""
    assert to_device([], DEVICE) == []
    assert not fake.machine.counts.launches
