"""Admission to the running batch, and the blocks of the next iterations: blocks of four tokens."""

from alignedserve.core.ids import BatchId
from alignedserve.core.request import SampledToken
from alignedserve.worker_core.candidate import Candidate
from decode_worker.batching.running_batch import RunningBatch, span_of
from decode_worker.state import LoadingCandidate, RunningRequest
from tests.support.samples import blocks, handoff, request


def candidate(name: str, prompt_len: int, max_tokens: int = 40) -> Candidate:
    """Build a candidate of one token more than its prompt."""
    of = handoff(request(name, prompt_len=prompt_len, max_tokens=max_tokens), 1)
    return Candidate.of_handoff(of, BatchId(1), 0.0)


def append_token(running: RunningRequest) -> None:
    running.append(SampledToken(running.request.request_id, 5), frozenset())


class RunningBatchHarness:
    """A running batch, here of at most three."""

    def __init__(self, num_blocks: int, max_running_requests: int = 3) -> None:
        self.batch = RunningBatch(num_blocks=num_blocks, block_size=4, max_running_requests=max_running_requests)

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


def test_growth_of_thirty_two_tokens_is_foreseen_for_all() -> None:
    sizes = [(2 + 8 + 2 + 8 - 1, None), (2 + 8 + 2 + 8, blocks(2, 3))]  # 8 tokens now, 40 then: ten blocks each
    for num_blocks, expected in sizes:
        harness = RunningBatchHarness(num_blocks)
        harness.enter("r1", 7)
        assert harness.batch.blocks_if_fits(candidate("r2", 7)) == expected


def test_what_is_being_copied_in_grows_too() -> None:
    harness = RunningBatchHarness(19)
    first = candidate("r1", 7)
    taken = harness.batch.blocks_if_fits(first)
    assert taken is not None
    harness.batch.load(LoadingCandidate(first, taken))
    assert harness.batch.blocks_if_fits(candidate("r2", 7)) is None


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


def test_blocks_on_their_way_out_count_as_coming() -> None:
    harness = RunningBatchHarness(4)
    harness.enter_anyway("r1", 7)
    harness.batch.begin_eviction(harness.enter_anyway("r2", 5))
    harness.iterate()
    assert harness.batch.grow() == (1, -1)  # two blocks are coming for the one that is wanting


def test_a_request_that_is_about_to_enter_grows_within_its_addition() -> None:
    harness = RunningBatchHarness(3)
    append_token(harness.enter_anyway("r1", 7))
    harness.batch.grow()
    changes = harness.batch.take_changes()
    assert changes.extensions == ()
    assert [addition.block_ids for addition in changes.additions] == [blocks(0, 1, 2)]


# --- lengths


def test_the_span_is_of_one_batch() -> None:
    harness = RunningBatchHarness(80)
    for name, prompt_len in (("r1", 7), ("r2", 20), ("r3", 11)):
        harness.enter(name, prompt_len).batch_id = BatchId(2 if name == "r2" else 1)
    assert span_of(harness.batch, BatchId(1)) == (8, 12)
    assert span_of(harness.batch, BatchId(3)) is None


# --- copies that are shorter than the context


def test_a_batch_that_is_as_before_has_the_very_slices_of_before() -> None:
    harness = RunningBatchHarness(20)
    harness.enter("r1", 7)
    assert harness.batch.slices() is harness.batch.slices()
