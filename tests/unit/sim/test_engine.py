"""The simulated engine's account of caches that leave in parts, and workers on the same cores."""

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import Request
from alignedserve.costmodel.linear import LinearCoefficients, LinearIterationModel
from alignedserve.messages.iterations import Addition, RunIteration, Swap, Swaps
from alignedserve.scheduling.policy import DeviceMemory
from lab.sim.config import Slowdowns
from lab.sim.copies import SharedCores
from lab.sim.engine import SimulatedAnswer, SimulatedEngine
from lab.sim.event_queue import EventQueue
from tests.harnesses.scheduling import EasyCosts, request_of

ONE, OTHER = RequestId("one"), RequestId("other")
MEMORY = DeviceMemory(100, 100, 16, num_free_host=1000)


def _added(request: Request, *block_ids: int, num_cached: int = 0) -> Addition:
    return Addition(request, (), tuple(map(BlockId, block_ids)), num_cached)


def _out(*block_ids: int) -> Swaps:
    return Swaps((), (Swap(ONE, 16 * len(block_ids), tuple(map(BlockId, block_ids))),), ())


def test_a_cache_leaves_in_two_parts_and_comes_back_as_one() -> None:
    engine = SimulatedEngine(
        EasyCosts(), {ONE: SimulatedAnswer(9), OTHER: SimulatedAnswer(9)}, MEMORY, keeps_timeline=False
    )
    one, other = request_of("one", {"prompt_len": 48}), request_of("other", {"prompt_len": 16})
    engine.begin(RunIteration((), (_added(one, 0, 1, 2),), (), ((ONE, 32),)), 0.0)
    engine.begin(RunIteration((ONE,), (_added(other, 2),), (), ((OTHER, 16),), _out(2)), 1.0)
    engine.begin(RunIteration((), (), (), ((OTHER, 1),), _out(1)), 2.0)
    back = Swaps((), (), (Swap(ONE, 32, tuple(map(BlockId, (0, 3, 4)))),))
    last = engine.begin(RunIteration((), (_added(one, 0, 3, 4, num_cached=32),), (), ((ONE, 16),), back), 3.0)
    assert [token.request_id for token in last.sampled] == [ONE]


def test_rows_under_a_grammar_cost_what_the_model_says_of_them() -> None:
    costs = LinearIterationModel(LinearCoefficients(base_s=1.0, constrained_s=0.25))
    engine = SimulatedEngine(costs, {ONE: SimulatedAnswer(9), OTHER: SimulatedAnswer(9)}, MEMORY, keeps_timeline=False)
    one, other = request_of("one", {"prompt_len": 16, "grammar": "g"}), request_of("other", {"prompt_len": 16})
    added = (_added(one, 0, 1), _added(other, 2, 3))
    both = ((ONE, 16), (OTHER, 16))
    assert engine.begin(RunIteration((), added, (), both), 0.0).duration_s == 1.25
    assert engine.begin(RunIteration((), (), (), ((ONE, 1), (OTHER, 1))), 2.0).duration_s == 1.25
    assert engine.begin(RunIteration((), (), (), ((OTHER, 1),)), 4.0).duration_s == 1.0


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
