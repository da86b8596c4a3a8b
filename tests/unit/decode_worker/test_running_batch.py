"""Admission to the running batch, and the blocks of the next iterations: blocks of four tokens."""

from alignedserve.core.ids import BatchId
from alignedserve.core.request import SampledToken
from decode_worker.batching.begun import span_of
from decode_worker.batching.running_batch import RunningBatch
from decode_worker.state import Candidate, Loading, RunningRequest
from tests.support.samples import blocks, handoff, request


def candidate(name: str, prompt_len: int, max_tokens: int = 40) -> Candidate:
    """Build a candidate of one token more than its prompt."""
    of = handoff(request(name, prompt_len=prompt_len, max_tokens=max_tokens), 1)
    return Candidate.of_handoff(of, BatchId(1), 0.0)


def append_token(running: RunningRequest) -> None:
    running.append(SampledToken(running.request.request_id, 5), frozenset())


class RunningBatchHarness:
    """A running batch, here of at most three."""

    def __init__(
        self,
        num_blocks: int,
        max_running_requests: int = 3,
    ) -> None:
        self.batch = RunningBatch(
            num_blocks=num_blocks,
            block_size=4,
            max_running_requests=max_running_requests,
        )

    def enter(self, name: str, prompt_len: int, max_tokens: int = 40) -> RunningRequest:
        one = candidate(name, prompt_len, max_tokens)
        block_ids = self.batch.blocks_if_fits(one)
        assert block_ids is not None, "it does not fit"
        self.batch.enter(one, block_ids, prompt_len, 0.0)
        return self.batch[one.request.request_id]

    def enter_anyway(self, name: str, prompt_len: int, max_tokens: int = 40) -> RunningRequest:
        """Enter a request as after others have grown less than they might."""
        one = candidate(name, prompt_len, max_tokens)
        taken = self.batch._allocator.allocate(self.batch.blocks_for(one.context_len))
        assert taken is not None, "there are no blocks"
        self.batch.enter(one, taken, prompt_len, 0.0)
        return self.batch[one.request.request_id]

    def iterate(self) -> None:
        """Give a token to every request that does not stall."""
        self.batch.take_changes()
        for request_id, num_tokens in self.batch.slices():
            running = self.batch[request_id]
            running.num_computed += num_tokens
            append_token(running)


# --- coming in


def test_the_first_gets_what_its_context_needs() -> None:
    assert RunningBatchHarness(2).batch.blocks_if_fits(candidate("r1", 7)) == blocks(0, 1)


def test_the_first_does_not_fit_where_its_context_does_not() -> None:
    assert RunningBatchHarness(1).batch.blocks_if_fits(candidate("r1", 7)) is None


def test_growth_of_thirty_two_tokens_is_foreseen_for_all() -> None:
    sizes = [(2 + 8 + 2 + 8 - 1, None), (2 + 8 + 2 + 8, blocks(2, 3))]  # 8 tokens now, 40 then: ten blocks each
    for num_blocks, expected in sizes:
        harness = RunningBatchHarness(num_blocks)
        harness.enter("r1", 7)
        assert harness.batch.blocks_if_fits(candidate("r2", 7)) == expected


def test_no_more_growth_is_foreseen_than_a_request_may_come_to() -> None:
    harness = RunningBatchHarness(4)
    harness.enter("r1", 7, max_tokens=1)
    assert harness.batch.blocks_if_fits(candidate("r2", 7, max_tokens=1)) == blocks(2, 3)


def test_what_is_being_copied_in_grows_too() -> None:
    harness = RunningBatchHarness(19)
    first = candidate("r1", 7)
    taken = harness.batch.blocks_if_fits(first)
    assert taken is not None
    harness.batch.load(Loading(first, taken))
    assert harness.batch.blocks_if_fits(candidate("r2", 7)) is None


def test_blocks_that_are_being_copied_out_are_not_free_yet() -> None:
    harness = RunningBatchHarness(4)
    block_ids = harness.batch.begin_eviction(harness.enter("r1", 9)).block_ids
    assert harness.batch.blocks_if_fits(candidate("r2", 7, max_tokens=1)) is None
    harness.batch.end_eviction(block_ids)
    assert harness.batch.blocks_if_fits(candidate("r2", 7, max_tokens=1)) is not None


def test_one_that_still_runs_does_not_enter_again() -> None:
    harness = RunningBatchHarness(40)
    harness.enter("r1", 7)
    assert harness.batch.blocks_if_fits(candidate("r1", 7)) is None


def test_places_are_taken_by_what_is_being_copied_in() -> None:
    harness = RunningBatchHarness(80, max_running_requests=1)
    harness.batch.load(Loading(candidate("r1", 7), blocks(0, 1)))
    assert harness.batch.blocks_if_fits(candidate("r2", 7)) is None


def test_a_request_that_is_admitted_is_not_evicted_within_the_foreseen_tokens() -> None:
    harness = RunningBatchHarness(20)
    harness.enter("r1", 7)
    harness.enter("r2", 7)
    for _ in range(32):
        growth = harness.batch.grow()
        assert (growth.num_stalled, max(growth.num_missing, 0)) == (0, 0)
        harness.iterate()


# --- growing


def test_a_full_last_block_is_foreseen_one_iteration_ahead() -> None:
    harness = RunningBatchHarness(2)
    harness.enter("r1", 7)  # eight tokens in eight slots: the next token needs a third block
    assert harness.batch.grow() == (0, 1)
    assert harness.batch.take_changes().extensions == ()


def test_a_request_at_its_end_needs_no_further_block() -> None:
    harness = RunningBatchHarness(2)
    harness.enter("r1", 7, max_tokens=1)
    assert harness.batch.grow() == (0, 0)
    assert harness.batch.take_changes().extensions == ()


def test_a_request_that_gets_no_block_stalls_and_the_others_go_on() -> None:
    harness = RunningBatchHarness(4)
    harness.enter_anyway("r1", 7)
    harness.enter_anyway("r2", 5)
    harness.iterate()
    assert harness.batch.grow() == (1, 1)
    assert harness.batch.take_changes().extensions == ()
    assert harness.batch.slices() == (("r2", 1),)


def test_a_stalled_request_goes_on_when_there_is_a_block() -> None:
    harness = RunningBatchHarness(4)
    harness.enter_anyway("r1", 7)
    other = harness.enter_anyway("r2", 5)
    harness.iterate()
    harness.batch.grow()
    harness.batch.drop(other)
    assert harness.batch.grow() == (0, -1)  # one is free beyond the one it gets
    assert harness.batch.take_changes().extensions == (("r1", blocks(2)),)
    assert harness.batch.slices() == (("r1", 1),)


def test_blocks_on_their_way_out_count_as_coming() -> None:
    harness = RunningBatchHarness(4)
    harness.enter_anyway("r1", 7)
    harness.batch.begin_eviction(harness.enter_anyway("r2", 5))
    harness.iterate()
    assert harness.batch.grow() == (1, -1)  # two blocks are coming for the one that is wanting


def test_a_request_that_is_about_to_enter_grows_within_its_addition() -> None:
    harness = RunningBatchHarness(3)
    one = harness.enter_anyway("r1", 7)
    append_token(one)
    harness.batch.grow()
    changes = harness.batch.take_changes()
    assert changes.extensions == ()
    assert [addition.block_ids for addition in changes.additions] == [blocks(0, 1, 2)]


# --- leaving


def test_a_request_that_was_in_the_engine_is_removed_from_it() -> None:
    harness = RunningBatchHarness(4)
    one = harness.enter("r1", 7)
    harness.iterate()
    harness.batch.drop(one)
    assert harness.batch.take_changes() == (("r1",), (), ())
    assert harness.batch.num_free == 4


def test_a_request_that_never_was_in_the_engine_is_not() -> None:
    harness = RunningBatchHarness(4)
    harness.batch.drop(harness.enter("r1", 7))
    assert harness.batch.take_changes() == ((), (), ())


# --- lengths


def test_the_span_is_of_one_batch() -> None:
    harness = RunningBatchHarness(80)
    for name, prompt_len in (("r1", 7), ("r2", 20), ("r3", 11)):
        harness.enter(name, prompt_len).batch_id = BatchId(2 if name == "r2" else 1)
    assert span_of(harness.batch, BatchId(1)) == (8, 12)
    assert span_of(harness.batch, BatchId(3)) is None


# --- copies that are shorter than the context


def enter_short(harness: RunningBatchHarness, num_cached: int) -> RunningRequest:
    """Enter r1 of eight tokens, of which a copy of so many came."""
    one = candidate("r1", 7)
    block_ids = harness.batch.blocks_if_fits(one)
    assert block_ids is not None, "it does not fit"
    harness.batch.enter(one, block_ids, num_cached, 0.0)
    return harness.batch[one.request.request_id]


def test_what_the_copy_lacked_is_computed_at_once_and_then_one_token_at_a_time() -> None:
    harness = RunningBatchHarness(20)
    running = enter_short(harness, 3)
    assert harness.batch.slices() == (("r1", 5),)
    append_token(running)
    assert harness.batch.slices() == (("r1", 1),)


def test_a_batch_that_is_as_before_has_the_very_slices_of_before() -> None:
    harness = RunningBatchHarness(20)
    harness.enter("r1", 7)
    assert harness.batch.slices() is harness.batch.slices()


def test_a_block_for_who_has_left_is_no_change() -> None:
    harness = RunningBatchHarness(20)
    running = harness.enter("r1", 7)
    harness.batch.take_changes()
    append_token(running)
    harness.batch.grow()
    harness.batch.drop(running)
    assert harness.batch.take_changes() == (("r1",), (), ())
