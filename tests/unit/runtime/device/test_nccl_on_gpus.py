"""Sums and collections over ranks by NCCL, on the fake CUDA: each rank is a thread with a GPU of its own."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from alignedserve.runtime.device.collectives import ProcessGroupCollectives
from alignedserve.runtime.engine.steps.step_passes import CudaCapture
from kernels.cpu.rank_exchange import ExchangeBroken
from tests.support.fake_cuda import FakeCuda, fake_cuda

SIZE = 2
Work = Callable[[ProcessGroupCollectives, torch.device], Tensor | None]


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with fake_cuda(pace=0.3, num_devices=SIZE) as fake:
        yield fake


class Ranks:
    """The ranks of one worker, on threads."""

    def __init__(self, meeting: Path, count: int = SIZE, timeout_s: float = 30.0) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in range(count)]
        made = [thread.submit(self._join, meeting, rank, timeout_s) for rank, thread in enumerate(self._threads)]
        self.ends = [one.result() for one in made]

    @staticmethod
    def _join(meeting: Path, rank: int, timeout_s: float) -> ProcessGroupCollectives:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        return ProcessGroupCollectives(meeting, rank, SIZE, device, timeout_s=timeout_s)

    def begin(self, rank: int, work: Work) -> "Future[Tensor | None]":
        return self._threads[rank].submit(work, self.ends[rank], torch.device("cuda", rank))

    def all(self, work: Work) -> list[Tensor | None]:
        begun = [self.begin(rank, work) for rank in range(SIZE)]
        return [one.result() for one in begun]


def test_every_rank_has_the_sum_and_the_first_has_all_parts(fake: FakeCuda, tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "meeting")

    def work(collectives: ProcessGroupCollectives, device: torch.device) -> Tensor | None:
        x = torch.full((3, 2), 1.0 + collectives.rank, device=device)
        total = collectives.all_reduce_(x) + x  # of the stream that waits for the sum
        parts = collectives.gather(x * 10.0 + collectives.rank)
        return total.cpu() if parts is None else torch.stack((*parts.cpu(), total.cpu()))

    first, second = ranks.all(work)
    assert first is not None
    assert first[:, 0, 0].tolist() == [30.0, 31.0, 6.0]
    assert second is not None
    assert set(second.flatten().tolist()) == {6.0}
    assert fake.machine.counts.names["nccl:allreduce"] == 2 * SIZE  # with those by which they met


def test_recorded_sums_are_those_of_each_replay(fake: FakeCuda, tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "meeting")

    def work(collectives: ProcessGroupCollectives, device: torch.device) -> Tensor | None:
        x = torch.zeros(4, device=device)
        replay = CudaCapture()(lambda: collectives.all_reduce_(x * 1.0))
        found = []
        for value in (1.0, 5.0):
            x.fill_(value * (1 + collectives.rank))
            found.append(replay().cpu())
        return torch.stack(found)

    for found in ranks.all(work):
        assert found is not None
        assert found[:, 0].tolist() == [3.0, 15.0]


def test_a_rank_that_waits_for_a_lost_one_is_let_go(fake: FakeCuda, tmp_path: Path) -> None:
    ranks, has_begun = Ranks(tmp_path / "meeting"), threading.Event()

    def work(collectives: ProcessGroupCollectives, device: torch.device) -> Tensor | None:
        x = collectives.all_reduce_(torch.ones(2, device=device))
        has_begun.set()
        return x.cpu()

    waiting = ranks.begin(0, work)
    assert has_begun.wait(30.0)
    assert not waiting.done()
    ranks.ends[0].break_off()
    found = waiting.result(30.0)
    assert found is not None
    assert found.isnan().all(), "no sum, and nothing raised"
    with pytest.raises(ExchangeBroken):
        ranks.begin(0, work).result(30.0)


def test_ranks_that_do_not_meet_say_so(fake: FakeCuda, tmp_path: Path) -> None:
    with pytest.raises(ExchangeBroken, match="do not meet"):
        Ranks(tmp_path / "meeting", count=1, timeout_s=0.2)
