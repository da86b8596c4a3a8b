"""Workers on the same cores."""

from alignedserve.sim.config import Slowdowns
from alignedserve.sim.event_queue import EventQueue
from alignedserve.sim.shared_cores import SharedCores


def ends(slowdown: float | Slowdowns, jobs: list[tuple[float, float]], prompts: tuple[int, ...] = ()) -> list[float]:
    """Return the times at which jobs (begin, duration alone) end. `prompts`: the numbers of those that have one."""
    event_queue = EventQueue()
    cores = SharedCores(event_queue, slowdown if isinstance(slowdown, Slowdowns) else Slowdowns.alike(slowdown))
    ended = [0.0] * len(jobs)

    def begin(number: int) -> None:
        cores.begin(jobs[number][1], number in prompts, lambda: ended.__setitem__(number, round(event_queue.now, 6)))

    for number, (time_s, _) in enumerate(jobs):
        event_queue.at(time_s, begin, number)
    event_queue.run()
    return ended


def test_alone_nothing_is_slower() -> None:
    assert ends(1.0, [(0.0, 2.0), (2.0, 1.0)]) == [2.0, 3.0]


def test_two_at_a_time_take_twice_as_long() -> None:
    assert ends(1.0, [(0.0, 2.0), (0.0, 2.0)]) == [4.0, 4.0]


def test_only_while_they_overlap() -> None:
    """The short one needs 2 s for its 1 s; the long one has done 1 + 1 of its 4 s by then."""
    assert ends(1.0, [(0.0, 4.0), (1.0, 1.0)]) == [5.0, 3.0]


def test_three_at_a_time() -> None:
    """At 1 / (1 + 0.5 * 2) = 1/2 of the speed, then at 2/3."""
    assert ends(0.5, [(0.0, 1.0), (0.0, 2.0), (0.0, 2.0)]) == [2.0, 3.5, 3.5]


def test_prompts_and_decodes_slow_each_other_by_their_own_shares() -> None:
    """The prompt runs at half of its speed, 1 s of 2 until the decode ends; that runs at 1 / 1.25."""
    slowdowns = Slowdowns(decodes_by_prompts=0.25, prompts_by_decodes=1.0)
    assert ends(slowdowns, [(0.0, 2.0), (0.0, 1.6)], prompts=(0,)) == [3.0, 2.0]
    assert ends(slowdowns, [(0.0, 2.0), (0.0, 1.6)], prompts=(0, 1)) == [2.0, 1.6]
