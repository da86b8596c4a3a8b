"""Sums and collections over ranks on threads of this process."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from kernels.cpu.rank_exchange import ExchangeBroken, RankExchange, has_rank_exchange, make_exchange_memory

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_rank_exchange(), reason="the native kernels are not built")]

SLOT_BYTES = 256


def ends_of(size: int, timeout_s: float = 60.0) -> list[RankExchange]:
    memory = make_exchange_memory(size, SLOT_BYTES)
    ends = [RankExchange(memory, rank, size, timeout_s=timeout_s, slot_bytes=SLOT_BYTES) for rank in range(size)]
    os.close(memory)
    return ends


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_the_ranks_in_order(size: int, dtype: torch.dtype) -> None:
    """In float32, rounded once; in one call and in several, the same bits."""
    parts = [torch.randn(30, 37).to(dtype) for _ in range(size)]
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()

    def rank(end: RankExchange) -> list[Tensor]:
        whole = end.all_reduce_(parts[end.rank].clone())
        rows = [end.all_reduce_(row.clone()) for row in parts[end.rank]]
        return [whole, torch.stack(rows)]

    with ThreadPoolExecutor(size) as threads:
        for results in threads.map(rank, ends_of(size)):
            assert all(torch.equal(result, expected.to(dtype)) for result in results)


def test_numbers_that_are_none_stay_so() -> None:
    parts = [torch.tensor([float("nan"), float("inf"), 1.0]), torch.tensor([1.0, -float("inf"), float("inf")])]
    with ThreadPoolExecutor(2) as threads:
        for dtype in (torch.float32, torch.bfloat16):
            sums = threads.map(lambda end, dtype=dtype: end.all_reduce_(parts[end.rank].to(dtype)), ends_of(2))
            for found in sums:
                assert found.isnan().tolist() == [True, True, False]
                assert found[2] == float("inf")


def test_collections_are_in_order() -> None:
    parts = [torch.arange(300) + 1000 * rank for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda end: end.all_gather(parts[end.rank], is_wanted=end.rank == 0), ends_of(3)))
    assert found[0] is not None
    assert torch.equal(found[0], torch.stack(parts))
    assert found[1:] == [None, None]


def test_a_rank_that_does_not_come_breaks_the_exchange_for_all() -> None:
    first, second = ends_of(2, timeout_s=0.05)
    with pytest.raises(ExchangeBroken):
        first.all_reduce_(torch.ones(3))
    with pytest.raises(ExchangeBroken):
        second.check()


def test_breaking_off_ends_a_wait() -> None:
    first, second = ends_of(2)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(first.all_reduce_, torch.ones(3))
        second.break_off()
        with pytest.raises(ExchangeBroken):
            waiting.result(30.0)


def test_a_rank_that_waits_for_long_leaves_the_core_to_others() -> None:
    """It sleeps, and is woken by the call it waits for: its time goes by without the processor's."""
    first, second = ends_of(2)
    used: list[float] = []

    def wait() -> Tensor:
        began_s = time.thread_time()
        found = first.all_reduce_(torch.ones(3))
        used.append(time.thread_time() - began_s)
        return found

    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(wait)
        time.sleep(1.0)
        assert second.all_reduce_(torch.ones(3)).tolist() == [2.0] * 3
        assert waiting.result(30.0).tolist() == [2.0] * 3
    assert used[0] < 0.2
