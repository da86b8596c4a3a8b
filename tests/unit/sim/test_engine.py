"""The simulated engine's account of caches that leave in parts."""

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import Request
from alignedserve.costmodel.linear import LinearCoefficients, LinearIterationModel
from alignedserve.messages.iterations import Addition, RunIteration, Swap, Swaps
from alignedserve.scheduling.policy import DeviceMemory
from alignedserve.sim.engine import SimulatedAnswer, SimulatedEngine
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
