"""Streams of a device: what they order, what they leave open, and an engine's loop over them in thousands of orders."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from alignedserve.runtime.device.streams import CheckedStreams, CudaStreams
from tests.harnesses.device_loop import DEPENDENCIES, Dependency, DeviceLoop
from tests.support.marks import each, many

NUM_SEQUENCES = 800
NUM_SLOW_SEQUENCES = many(12_000)
NUM_CUDA_SEQUENCES = 200
# Without one of the dependencies, one sequence in two to fifty goes wrong.
MAX_SEQUENCES_TO_SHOW = 1_000


class Notes:
    """Operations that write down that they happened."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def of(self, word: str) -> Callable[[], None]:
        return lambda: self.taken.append(word)


def numbers(*values: int) -> Tensor:
    return torch.tensor(values)


def test_nothing_happens_until_the_host_waits() -> None:
    streams, notes = CheckedStreams(0), Notes()
    compute = streams.stream("compute")
    compute.run(notes.of("a"))
    event = compute.record()
    assert not event.is_done()
    assert notes.taken == []
    event.synchronize()
    assert event.is_done()
    assert notes.taken == ["a"]


def test_a_stream_keeps_its_order_and_an_event_leaves_what_comes_behind_it() -> None:
    streams, notes = CheckedStreams(0), Notes()
    compute = streams.stream("compute")
    compute.run(notes.of("a"))
    compute.run(notes.of("b"))
    event = compute.record()
    compute.run(notes.of("c"))
    event.synchronize()
    assert notes.taken == ["a", "b"]
    streams.drain()
    assert notes.taken == ["a", "b", "c"]


def test_an_event_of_an_empty_stream_needs_nothing_done() -> None:
    streams = CheckedStreams(0)
    event = streams.stream("compute").record()
    event.synchronize()
    event.synchronize()  # again: it stays done
    assert event.is_done()


def test_a_name_is_one_stream() -> None:
    streams = CheckedStreams(0)
    assert streams.stream("offload") is streams.stream("offload")
    assert streams.stream("offload") is not streams.stream("prefetch")


def order_of_three(seed: int, *, is_ordered: bool) -> str:
    """Run an operation on each of two streams, a third behind the first; `is_ordered`: the second waits for it."""
    streams, notes = CheckedStreams(seed), Notes()
    first, second = streams.stream("first"), streams.stream("second")
    first.run(notes.of("a"))
    first.run(notes.of("b"))
    if is_ordered:
        second.wait(first.record())
    second.run(notes.of("c"))
    streams.drain()
    return "".join(notes.taken)


def test_streams_without_a_wait_take_every_order() -> None:
    assert {order_of_three(seed, is_ordered=False) for seed in range(50)} == {"abc", "acb", "cab"}


def test_a_wait_leaves_one_order() -> None:
    assert {order_of_three(seed, is_ordered=True) for seed in range(50)} == {"abc"}


def test_the_same_seed_gives_the_same_order() -> None:
    assert all(order_of_three(s, is_ordered=False) == order_of_three(s, is_ordered=False) for s in range(20))


def test_a_wait_holds_up_only_what_comes_behind_it() -> None:
    streams, notes = CheckedStreams(0), Notes()
    compute, offload = streams.stream("compute"), streams.stream("offload")
    compute.run(notes.of("computed"))
    computed = compute.record()
    offload.run(notes.of("before"))
    before = offload.record()
    offload.wait(computed)
    offload.run(notes.of("behind"))
    behind = offload.record()
    before.synchronize()
    assert "behind" not in notes.taken or "computed" in notes.taken
    behind.synchronize()
    assert notes.taken.index("computed") < notes.taken.index("behind")


def test_copies_go_out_and_in() -> None:
    streams = CheckedStreams(0)
    offload, prefetch = streams.stream("offload"), streams.stream("prefetch")
    rows, pinned, back = numbers(1, 2, 3), numbers(0, 0, 0), numbers(0, 0, 0)
    offload.copy_out(rows, pinned)
    prefetch.wait(offload.record())
    prefetch.copy_in(pinned, back)
    prefetch.record().synchronize()
    assert back.tolist() == [1, 2, 3]


def staging_that_the_host_writes_again(*, waits: bool) -> tuple[list[int], list[int]]:
    """Return the bytes that the host read from staging after an offload, and those that a prefetch found there next."""
    streams = CheckedStreams(0)
    offload, prefetch = streams.stream("offload"), streams.stream("prefetch")
    staging, back = numbers(0, 0), numbers(0, 0)
    offload.copy_out(numbers(1, 2), staging)
    event = offload.record()
    if waits:
        event.synchronize()
    taken = staging.tolist()
    staging.fill_(7)
    prefetch.wait(event)
    prefetch.copy_in(staging, back)
    streams.drain()
    return taken, back.tolist()


def test_the_host_reads_staging_and_writes_it_again_once_the_offload_is_done() -> None:
    assert staging_that_the_host_writes_again(waits=True) == ([1, 2], [7, 7])


def test_a_host_that_does_not_wait_for_the_offload_gets_wrong_bytes() -> None:
    assert staging_that_the_host_writes_again(waits=False) == ([0, 0], [1, 2])


def test_another_stream_may_come_in_the_middle_of_a_copy() -> None:
    seen = set()
    for seed in range(50):
        streams = CheckedStreams(seed)
        rows, pinned = numbers(1, 2), numbers(0, 0)
        streams.stream("offload").copy_out(rows, pinned)
        streams.stream("compute").run(lambda rows=rows: rows.fill_(9))  # type: ignore[misc]
        streams.drain()
        seen.add(tuple(pinned.tolist()))
    assert seen == {(1, 2), (1, 9), (9, 9)}


def test_an_event_of_other_streams_breaks_an_invariant() -> None:
    ours, theirs = CheckedStreams(0), CheckedStreams(0)
    ours.stream("compute").wait(theirs.stream("compute").record())
    with pytest.raises(AssertionError, match="cannot happen"):
        ours.drain()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (torch.zeros(3, dtype=torch.int64), "two shapes"),
        (torch.zeros(2, dtype=torch.int32), "two dtypes"),
        (torch.zeros(4, dtype=torch.int64)[::2], "not contiguous"),
    ],
)
def test_a_copy_that_a_device_could_not_do_at_once_breaks_an_invariant(target: Tensor, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        CheckedStreams(0).stream("offload").copy_out(numbers(1, 2), target)


# --- an engine's loop


def is_undisturbed(seed: int, without: Dependency | None = None) -> bool:
    return DeviceLoop(CheckedStreams(seed), seed, without=without).outcome_is_undisturbed()


def test_any_order_gives_what_the_undisturbed_run_does() -> None:
    assert [seed for seed in range(NUM_SEQUENCES) if not is_undisturbed(seed)] == []


@pytest.mark.slow
def test_any_order_gives_what_the_undisturbed_run_does_in_many_sequences() -> None:
    seeds = range(NUM_SEQUENCES, NUM_SEQUENCES + NUM_SLOW_SEQUENCES)
    assert [seed for seed in seeds if not is_undisturbed(seed)] == []


@each("dependency", DEPENDENCIES, ids=str)
def test_a_dependency_that_is_not_kept_shows_as_wrong_bytes(dependency: Dependency) -> None:
    assert not all(is_undisturbed(seed, dependency) for seed in range(MAX_SEQUENCES_TO_SHOW))


@pytest.mark.gpu
def test_streams_give_what_the_undisturbed_run_does() -> None:
    device = torch.device("cuda")
    for seed in range(NUM_CUDA_SEQUENCES):
        assert DeviceLoop(CudaStreams(device), seed, device=device).outcome_is_undisturbed(), f"sequence {seed}"
