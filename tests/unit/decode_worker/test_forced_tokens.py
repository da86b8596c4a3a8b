"""Tokens that a grammar forced come with the one sampled after them: a worker counts them like any others."""

from dataclasses import replace
from typing import Any

from alignedserve.core.request import FinishReason, Request, SampledToken
from alignedserve.messages.events import Ticked
from alignedserve.messages.gateways import AbortRequest, TokenDelta
from alignedserve.messages.iterations import IterationTimes
from alignedserve.messages.workers import IterationLogReport, RequestFinished
from tests.harnesses.colocated import ColocatedHarness, emitted, run, runs, to_router
from tests.harnesses.decode import EOS, H1, H2, DecodeHarness
from tests.harnesses.decode import emitted as to_gateway
from tests.harnesses.decode import run as run_decodes
from tests.harnesses.scheduling import Step
from tests.support.marks import each
from tests.support.samples import R1, R2, request

FIVE = SampledToken(R1, 5), SampledToken(R1, 6), SampledToken(R1, 7)
TWO_FORCED = ((R1, 2),)


def of(name: str, prompt_len: int) -> Request:
    made = request(name, prompt_len=prompt_len)
    return replace(made, sampling=replace(made.sampling, max_tokens=40))


def decoding(**sizes: Any) -> ColocatedHarness:
    """r1 has a prompt of four tokens and its first token; its next one needs a second block."""
    made = ColocatedHarness(**sizes)
    made.begin(of("r1", 4))
    made.follow(Step(r1=4), Step(r1=1), *(Step(r1=1) for _ in range(3)))
    made.sampled(r1=9)
    return made


def test_a_colocated_worker_sends_them_as_one() -> None:
    assert decoding().completed(*FIVE, forced=TWO_FORCED) == [run(r1=1), emitted(TokenDelta(R1, 1, (5, 6, 7)))]


def test_their_cache_is_counted_and_the_next_block_comes_in_time() -> None:
    made = decoding()
    made.completed(*FIVE, forced=TWO_FORCED)  # seven tokens are computed, in two blocks
    table = made.view.table
    row = table.row(R1)
    assert (table.num_cached[row], table.num_generated[row], table.num_remaining[row]) == (7, 4, 1)
    assert runs(made.sampled(r1=10)) == [run(grown=[("r1", 2)], r1=1)]


def test_an_answer_may_end_behind_them() -> None:
    commands = decoding().completed(*FIVE[:2], SampledToken(R1, EOS), forced=TWO_FORCED)
    assert emitted(TokenDelta(R1, 1, (5, 6, EOS), (), FinishReason.STOP)) in commands
    assert to_router(RequestFinished(R1, 1, 4)) in commands


def test_one_that_nobody_waits_for_leaves_its_blocks() -> None:
    made = decoding()
    made.hear(AbortRequest(R1, 1))
    made.completed(*FIVE, forced=TWO_FORCED)
    assert made.loads[-1].num_free_blocks == 20


@each("is_aborted", [False, True])
def test_blocks_that_they_fill_are_cached_with_them(is_aborted: bool) -> None:
    made = ColocatedHarness(has_prefix_cache=True)
    made.begin(replace(of("r1", 2), prompt_token_ids=(20, 21), prefix_root=b"r" * 16))
    made.follow(Step(r1=2), Step(r1=1))
    made.sampled(r1=22)  # two are computed: two slots of the block are left
    if is_aborted:
        made.hear(AbortRequest(R1, 1))
    made.completed(SampledToken(R1, 23), SampledToken(R1, 24), forced=((R1, 1),))
    made.begin(replace(of("r2", 9), prompt_token_ids=(20, 21, 22, 23, 24, 25, 26, 27, 28), prefix_root=b"r" * 16))
    (iteration,) = runs(made.follow(Step(r2=1)))
    assert iteration.additions[0].num_cached == (0 if is_aborted else 4)


def test_a_decode_worker_grows_by_them() -> None:
    made = DecodeHarness()
    made.enter(H1, H2)
    tokens = SampledToken(R1, 7), SampledToken(R1, 8), SampledToken(R1, 9), SampledToken(R2, 6)
    commands = made.completed(*tokens, forced=TWO_FORCED)
    assert to_gateway(TokenDelta(R1, 1, (7, 8, 9)), TokenDelta(R2, 1, (6,))) in commands
    assert run_decodes(grown=[("r2", 4)], slices={"r1": 1, "r2": 1}) in commands
    commands = made.completed(SampledToken(R1, 5), SampledToken(R2, 6))
    assert run_decodes(grown=[("r1", 5)], slices={"r1": 1, "r2": 1}) in commands


def test_the_log_counts_the_contexts_of_the_next_iteration() -> None:
    made = decoding()
    times = IterationTimes(0.0, 0.5, 0.1, 0.2, 0.1)
    made.now = 1.0
    made.completed(*FIVE, forced=TWO_FORCED, times=times)
    made.now = 3.0
    made.completed(SampledToken(R1, 8), times=times)
    assert made.logic.iteration_log.records()[-1].longest == 8
    assert any(isinstance(getattr(one, "message", None), IterationLogReport) for one in made.do(Ticked()))


def test_a_request_that_was_skipped_computes_its_token_again() -> None:
    made = decoding()
    assert made.completed(skipped=(R1,)) == [run(r1=1)]
    table = made.view.table
    row = table.row(R1)
    assert (table.num_cached[row], table.num_generated[row], table.num_remaining[row]) == (4, 1, 1)
    assert emitted(TokenDelta(R1, 1, (5,))) in made.completed(SampledToken(R1, 5))


def test_a_decode_worker_skips_one_and_goes_on_with_the_other() -> None:
    made = DecodeHarness()
    made.enter(H1, H2)
    commands = made.completed(SampledToken(R2, 6), skipped=(R1,))
    assert to_gateway(TokenDelta(R2, 1, (6,))) in commands
    assert run_decodes(grown=[("r2", 4)], slices={"r1": 1, "r2": 1}) in commands
