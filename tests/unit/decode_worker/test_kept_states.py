"""States in blocks of their own: where a worker keeps some, who goes on there, and what is forgotten first.

Blocks of four tokens; a request's states take two, which are the first of its blocks.
"""

from dataclasses import replace
from typing import Any

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import Request
from alignedserve.messages.iterations import RunIteration, StateKept
from alignedserve.prefix_cache.block_hashes import prefix_root
from tests.harnesses.colocated import ColocatedHarness, runs
from tests.harnesses.scheduling import Step
from tests.support.samples import request

ROOT = prefix_root(b"key", tenant="one", salt="", form=b"")
BEGINNING = tuple(range(100, 108))


def _request(name: str, *more: int) -> Request:
    return replace(request(name), prompt_token_ids=BEGINNING + more, prefix_root=ROOT)


def _worker(**sizes: Any) -> ColocatedHarness:
    return ColocatedHarness(state_blocks=2, has_prefix_cache=True, max_states=sizes.pop("max_states", 4), **sizes)


def _step(worker: ColocatedHarness, *steps: Step) -> RunIteration:
    return runs(worker.follow(*steps))[0]


def _first(worker: ColocatedHarness) -> None:
    """Compute a first prompt of ten tokens, and its answer of three; its states are kept behind eight."""
    worker.begin(_request("a", 1, 2))
    began = _step(worker, Step(a=10), Step(a=1), Step(a=1))
    assert began.additions[0].block_ids == tuple(map(BlockId, range(5)))  # two of states, three of tokens
    assert began.states == (StateKept(RequestId("a"), 8, (BlockId(5), BlockId(6))),)
    worker.sampled(a=7)
    again = runs(worker.sampled(a=7))[0]  # the answer passes the edge behind twelve
    assert [kept.num_tokens for kept in again.states] == [12]
    worker.sampled(a=2)


def test_a_prompt_goes_on_behind_the_last_edge_of_the_one_before() -> None:
    worker = _worker()
    _first(worker)
    worker.begin(_request("b", 3, 4, 5))
    began = _step(worker, Step(b=3))
    assert began.additions[0].num_cached == 8
    assert [copy.source for copy in began.copies] == [BlockId(5), BlockId(6)]
    assert [copy.target for copy in began.copies] == list(began.additions[0].block_ids[:2])
    worker.sampled(b=2)
    assert worker.logic._state.num_free == 20


def test_a_next_turn_goes_on_behind_the_answer() -> None:
    worker = _worker()
    _first(worker)
    worker.begin(_request("b", 1, 2, 7, 7, 9))
    assert _step(worker, Step(b=1)).additions[0].num_cached == 12


def test_what_lies_behind_the_last_states_is_computed_again() -> None:
    """Then states are kept where both had the same tokens, for a third."""
    worker = _worker(max_states=1)  # that behind the answer, in place of that behind the prompt
    _first(worker)
    worker.begin(_request("b", 3, 4, 5))
    began = _step(worker, Step(b=11))
    assert began.additions[0].num_cached == 0
    assert [kept.num_tokens for kept in began.states] == [8]
    worker.sampled(b=2)
    worker.begin(_request("c", 6, 6))
    assert _step(worker, Step(c=2)).additions[0].num_cached == 8


def test_states_give_way_to_requests() -> None:
    worker = _worker(num_blocks=10)
    _first(worker)
    worker.begin(request("b", prompt_len=24, prefix_root=ROOT))
    assert len(_step(worker, Step(b=10), Step(b=10), Step(b=4)).additions[0].block_ids) == 5
    worker.sampled()
    worker.sampled()
    worker.sampled(b=2)
    assert worker.logic._state.num_free == 10
