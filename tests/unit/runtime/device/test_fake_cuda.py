"""The rules of the fake CUDA, each by a program that breaks it."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from alignedserve.runtime.device.streams import CudaStreams
from alignedserve.runtime.engine.steps.step_passes import CudaCapture
from tests.support.devices.memory_drivers import StandInCuda
from tests.support.fake_cuda import FakeCuda, fake_cuda
from tests.support.fake_cuda.machine import CaptureRefused
from tests.support.marks import each

DEVICE = torch.device("cuda", 0)
CUDA: Any = torch.cuda


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with fake_cuda(pace=0.0) as fake:
        yield fake


def on_gpu(*numbers: float) -> Tensor:
    return torch.tensor(numbers, device=DEVICE)


# --- memory


def test_memory_is_the_next_tensor_s_of_its_stream_at_once_and_of_no_other_s(fake: FakeCuda) -> None:
    first = torch.empty(8, device=DEVICE)
    address = first.data_ptr()
    del first
    with CUDA.stream(CUDA.Stream()):
        assert torch.empty(8, device=DEVICE).data_ptr() != address
    assert torch.empty(8, device=DEVICE).data_ptr() == address


def test_views_keep_memory_and_what_is_given_back_is_poisoned(fake: FakeCuda) -> None:
    whole = on_gpu(1.0, 2.0, 3.0)
    view, alias = whole[1:], fake.alias(whole)
    del whole
    torch.cuda.synchronize()
    assert alias.tolist() == [1.0, 2.0, 3.0]
    del view
    torch.cuda.synchronize()
    assert alias.isnan().all()


@each("is_recorded", [True, False])
def test_memory_waits_for_the_streams_that_were_recorded(*, is_recorded: bool) -> None:
    seen = set()
    for seed in range(20):
        with fake_cuda(seed, pace=0.0):
            side, first, out = CUDA.Stream(), torch.ones(8, device=DEVICE), torch.zeros(8, device=DEVICE)
            side.wait_stream(CUDA.current_stream())
            with CUDA.stream(side):
                out.copy_(first)
            if is_recorded:
                first.record_stream(side)
            del first
            torch.full((8,), 7.0, device=DEVICE)
            CUDA.synchronize()
            seen.add(out[0].item() == 1.0)
    assert seen == ({True} if is_recorded else {True, False})


# --- order


def test_nothing_is_done_before_somebody_waits(fake: FakeCuda) -> None:
    tensor = torch.zeros(2, device=DEVICE)
    tensor += 1.0
    event = CUDA.Event()
    event.record()
    assert not event.query()
    assert tensor.tolist() == [1.0, 1.0]
    assert event.query()
    assert fake.machine.counts.synchronisations == 1


def test_pytorch_s_streams_are_given_out_in_turn(fake: FakeCuda) -> None:
    streams = [CUDA.Stream() for _ in range(33)]
    assert streams[0] == streams[32] != streams[1]


def test_a_step_that_fails_ends_everything(fake: FakeCuda) -> None:
    torch.zeros(2, device=DEVICE).index_select(0, torch.full((1,), 5, device=DEVICE))
    for _ in range(2):
        with pytest.raises(torch.AcceleratorError, match="out of range"):
            torch.cuda.synchronize()


# --- captures


def captured(work: Callable[[Tensor], object]) -> None:
    given = torch.ones(4, device=DEVICE)

    def whole() -> Tensor:
        work(given)
        return given * 2

    CudaStreams(DEVICE).stream("compute").run(lambda: CudaCapture()(whole))


@each(
    "refused",
    [
        lambda given: given.sum().item(),
        lambda given: given.tolist(),
        lambda given: given.nonzero(),
        lambda given: given[given > 0.5],
        lambda given: torch.bincount(given.long()),
        lambda given: given.copy_(torch.ones(4)),
        lambda given: torch.tensor([1.0], device=DEVICE),
        lambda given: given.cpu(),
        lambda given: CUDA.synchronize(),
        lambda given: CUDA.current_stream().synchronize(),
    ],
)
def test_a_capture_refuses_what_waits_for_the_device(refused: Callable[[Tensor], object], fake: FakeCuda) -> None:
    with pytest.raises(CaptureRefused, match="not permitted when stream is capturing"):
        captured(refused)


def test_a_capture_takes_copies_of_page_locked_memory_and_replays_read_what_is_there_then(fake: FakeCuda) -> None:
    given, host = torch.ones(4, device=DEVICE), torch.ones(4, pin_memory=True)
    replay = CudaCapture()(lambda: given.copy_(host, non_blocking=True) * 2)
    host.fill_(3.0)
    fake.machine.counts.clear()
    assert replay().tolist() == [6.0] * 4
    counts = fake.machine.counts
    assert (counts.replays, counts.kernels, counts.copies) == (1, 1, 2)  # one of the copies is the answer's


def test_a_graph_reads_memory_that_is_another_s_when_nothing_keeps_it(fake: FakeCuda) -> None:
    given = torch.ones(4, device=DEVICE)
    replay = CudaCapture()(partial(torch.mul, given, 2))
    del given
    torch.full((4,), 7.0, device=DEVICE)
    assert replay().tolist() != [2.0] * 4


# --- what PyTorch and the driver refuse


def test_the_runtime_s_last_error_waits_for_the_next_kernel() -> None:
    with fake_cuda(driver=StandInCuda(largest=0)):
        tensor = torch.ones(2, device=DEVICE)
        assert CUDA.cudart().cudaHostRegister(4096, 4096, 1) == StandInCuda.OUT_OF_MEMORY
        with pytest.raises(torch.AcceleratorError, match="out of memory"):
            tensor.add_(1.0)
        assert tensor.add_(1.0).tolist() == [2.0, 2.0]


@each(
    "refused",
    [
        lambda: on_gpu(1.0) + torch.ones(1),
        lambda: on_gpu(1.0).numpy(),
        lambda: on_gpu(1.0) + torch.ones(1, device="cuda:1"),
        lambda: torch.empty(2, device=DEVICE, pin_memory=True),
    ],
)
def test_memories_are_not_mixed(refused: Callable[[], object]) -> None:
    with fake_cuda(num_devices=2), pytest.raises((RuntimeError, TypeError)):
        refused()


def test_a_copy_across_two_registrations_is_an_invalid_argument(fake: FakeCuda) -> None:
    host = torch.zeros(8192, dtype=torch.uint8)
    for part in (host[:4096], host[4096:]):
        fake.memory.registered[part.data_ptr()] = 4096
    there = torch.empty(8192, dtype=torch.uint8, device=DEVICE)
    there[:4096].copy_(host[:4096], non_blocking=True)
    with pytest.raises(torch.AcceleratorError, match="invalid argument"):
        there.copy_(host, non_blocking=True)


def test_counts_are_of_kernels_launches_bytes_and_waits(fake: FakeCuda) -> None:
    x, weight = torch.ones((4, 8), device=DEVICE), torch.ones((8, 8), device=DEVICE)
    fake.machine.counts.clear()
    y = x @ weight
    y.add_(1.0)
    y.cpu()
    counts = fake.machine.counts
    assert (counts.kernels, counts.launches, counts.copies, counts.synchronisations) == (2, 3, 1, 1)
    assert (counts.read_bytes, counts.written_bytes) == (4 * (32 + 64) + 4 * 32, 2 * 4 * 32)
    assert (counts.copied_bytes, counts.pageable_copies) == (4 * 32, 1)
