"""Who fits into the running batch, and what it needs for the next iteration: blocks of four tokens."""

from alignedserve.core.ids import BatchId
from decode_worker.running import RunningBatch
from decode_worker.state import Candidate, Loading, RunningRequest
from tests.samples import blocks, handoff, request


def candidate(name: str, prompt_len: int, max_tokens: int = 40) -> Candidate:
    """Of one token more than its prompt."""
    of = handoff(request(name, prompt_len=prompt_len, max_tokens=max_tokens), 1)
    return Candidate.of_handoff(of, BatchId(1), 0.0)


class Desk:
    """A running batch, here of at most three."""

    def __init__(self, num_blocks: int, max_running: int = 3) -> None:
        self.batch = RunningBatch(num_blocks=num_blocks, block_size=4, max_running=max_running)

    def enter(self, name: str, prompt_len: int, max_tokens: int = 40) -> RunningRequest:
        one = candidate(name, prompt_len, max_tokens)
        block_ids = self.batch.blocks_if_fits(one)
        assert block_ids is not None, "it does not fit"
        running = RunningRequest.of_candidate(one, block_ids, prompt_len)
        self.batch.enter(running)
        return running

    def enter_anyway(self, name: str, prompt_len: int, max_tokens: int = 40) -> RunningRequest:
        """As after others have grown less than they might."""
        one = candidate(name, prompt_len, max_tokens)
        taken = self.batch._allocator.allocate(self.batch.blocks_for(one.context_len))
        assert taken is not None, "there are no blocks"
        running = RunningRequest.of_candidate(one, taken, prompt_len)
        self.batch.enter(running)
        return running

    def iterate(self) -> None:
        """Everybody who does not stall gets a token."""
        self.batch.entering()
        for request_id, num_tokens in self.batch.slices(100):
            running = self.batch[request_id]
            running.num_computed += num_tokens
            running.note_token(5)


# --- coming in


def test_the_first_gets_what_its_context_needs() -> None:
    assert Desk(2).batch.blocks_if_fits(candidate("r1", 7)) == blocks(0, 1)


def test_the_first_does_not_fit_where_its_context_does_not() -> None:
    assert Desk(1).batch.blocks_if_fits(candidate("r1", 7)) is None


def test_growth_of_thirty_two_tokens_is_foreseen_for_everybody() -> None:
    sizes = [(2 + 8 + 2 + 8 - 1, None), (2 + 8 + 2 + 8, blocks(2, 3))]  # 8 tokens now, 40 then: ten blocks each
    for num_blocks, expected in sizes:
        desk = Desk(num_blocks)
        desk.enter("r1", 7)
        assert desk.batch.blocks_if_fits(candidate("r2", 7)) == expected


def test_no_more_growth_is_foreseen_than_a_request_may_come_to() -> None:
    desk = Desk(4)
    desk.enter("r1", 7, max_tokens=1)
    assert desk.batch.blocks_if_fits(candidate("r2", 7, max_tokens=1)) == blocks(2, 3)


def test_what_is_being_copied_in_grows_too() -> None:
    desk = Desk(19)
    first = candidate("r1", 7)
    taken = desk.batch.blocks_if_fits(first)
    assert taken is not None
    desk.batch.load(Loading(first, taken))
    assert desk.batch.blocks_if_fits(candidate("r2", 7)) is None


def test_blocks_that_are_being_copied_out_are_not_free_yet() -> None:
    desk = Desk(4)
    block_ids = desk.batch.take_out(desk.enter("r1", 9))
    assert desk.batch.blocks_if_fits(candidate("r2", 7, max_tokens=1)) is None
    desk.batch.copied_out(block_ids)
    assert desk.batch.blocks_if_fits(candidate("r2", 7, max_tokens=1)) is not None


def test_one_that_still_runs_does_not_enter_again() -> None:
    desk = Desk(40)
    desk.enter("r1", 7)
    assert desk.batch.blocks_if_fits(candidate("r1", 7)) is None


def test_places_are_taken_by_what_is_being_copied_in() -> None:
    desk = Desk(80, max_running=1)
    desk.batch.load(Loading(candidate("r1", 7), blocks(0, 1)))
    assert desk.batch.blocks_if_fits(candidate("r2", 7)) is None


def test_whoever_is_admitted_is_not_evicted_within_the_foreseen_tokens() -> None:
    desk = Desk(20)
    desk.enter("r1", 7)
    desk.enter("r2", 7)
    for _ in range(32):
        growth = desk.batch.grow()
        assert (growth.num_stalled, max(growth.num_missing, 0)) == (0, 0)
        desk.iterate()


# --- growing


def test_a_full_last_block_is_foreseen_one_iteration_ahead() -> None:
    desk = Desk(2)
    desk.enter("r1", 7)  # eight tokens in eight slots: the next token needs a third block
    assert desk.batch.grow() == ((), 0, 1)


def test_a_request_at_its_end_needs_no_further_block() -> None:
    desk = Desk(2)
    desk.enter("r1", 7, max_tokens=1)
    assert desk.batch.grow() == ((), 0, 0)


def test_whoever_gets_no_block_stalls_and_the_others_go_on() -> None:
    desk = Desk(4)
    desk.enter_anyway("r1", 7)
    desk.enter_anyway("r2", 5)
    desk.iterate()
    growth = desk.batch.grow()
    assert growth == ((), 1, 1)
    assert desk.batch.slices(100) == (("r2", 1),)


def test_a_stalled_request_goes_on_when_there_is_a_block() -> None:
    desk = Desk(4)
    desk.enter_anyway("r1", 7)
    other = desk.enter_anyway("r2", 5)
    desk.iterate()
    desk.batch.grow()
    desk.batch.drop(other)
    assert desk.batch.grow().extensions == (("r1", blocks(2)),)
    assert desk.batch.slices(100) == (("r1", 1),)


def test_blocks_on_their_way_out_count_as_coming() -> None:
    desk = Desk(4)
    desk.enter_anyway("r1", 7)
    desk.batch.take_out(desk.enter_anyway("r2", 5))
    desk.iterate()
    assert desk.batch.grow() == ((), 1, -1)  # two blocks are coming for the one that is wanting


def test_whoever_is_about_to_enter_grows_within_its_addition() -> None:
    desk = Desk(3)
    one = desk.enter_anyway("r1", 7)
    one.note_token(5)
    assert desk.batch.grow().extensions == ()
    (addition,) = desk.batch.entering()[1]
    assert addition.block_ids == blocks(0, 1, 2)


# --- leaving


def test_whoever_was_in_the_engine_is_removed_from_it() -> None:
    desk = Desk(4)
    one = desk.enter("r1", 7)
    desk.iterate()
    desk.batch.drop(one)
    assert desk.batch.entering() == (("r1",), ())
    assert desk.batch.num_free == 4


def test_whoever_never_was_in_the_engine_is_not() -> None:
    desk = Desk(4)
    desk.batch.drop(desk.enter("r1", 7))
    assert desk.batch.entering() == ((), ())


# --- lengths


def test_the_span_is_of_one_batch() -> None:
    desk = Desk(80)
    for name, prompt_len in (("r1", 7), ("r2", 20), ("r3", 11)):
        desk.enter(name, prompt_len).batch_id = BatchId(2 if name == "r2" else 1)
    assert desk.batch.span(BatchId(1)) == (8, 12)
    assert desk.batch.span(BatchId(3)) is None
