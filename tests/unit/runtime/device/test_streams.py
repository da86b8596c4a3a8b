"""Streams of a device: what they order, what they leave open, and what a device could not do."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.devices.checked_streams import CheckedStreams


class Notes:
    """Operations that write down that they happened."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def of(self, word: str) -> Callable[[], None]:
        return lambda: self.taken.append(word)


def numbers(*values: int) -> Tensor:
    return torch.tensor(values)


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
