"""A colocated worker with a prefix cache, step by step: blocks of four tokens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import Request, SampledToken, SamplingParams
from alignedserve.messages.events import PeerConnected, Send, SendTo, Ticked
from alignedserve.messages.gateways import TokensEmitted
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import BlockCopied, BlockReplacement, RunIteration
from alignedserve.messages.prefixes import PrefixBlocksChanged
from alignedserve.messages.workers import PrefillCompleted
from alignedserve.prefix_cache.block_hashes import prefix_root
from tests.harnesses.colocated import ColocatedHarness, runs, to_router
from tests.harnesses.scheduling import Step
from tests.support.samples import ROUTER, blocks, request

ROOT = prefix_root(b"key", tenant="one", salt="", form=b"")
OTHER = prefix_root(b"key", tenant="another", salt="", form=b"")


def of(name: str, *tokens: int, root: bytes = ROOT, **sampling: Any) -> Request:
    made = replace(request(name), prompt_token_ids=tokens, prefix_root=root)
    return replace(made, sampling=SamplingParams(**{"max_tokens": 20} | sampling)) if sampling else made


def worker(**sizes: Any) -> ColocatedHarness:
    return ColocatedHarness(has_prefix_cache=True, **sizes)


def ended(made: ColocatedHarness, *tokens: int, root: bytes = ROOT) -> None:
    """Compute a prompt and end its request: its full blocks stay cached, from block 0 on."""
    made.begin(of("first", *tokens, root=root))
    made.follow(Step(first=len(tokens)))
    made.sampled(first=2)


def alone(name: str, num_tokens: int) -> Step:
    parts: Any = {name: num_tokens}
    return Step(**parts)


def only(commands: list[Any]) -> RunIteration:
    (iteration,) = runs(commands)
    return iteration


def told(commands: Sequence[object]) -> list[PrefixBlocksChanged]:
    messages = [one.message for one in commands if isinstance(one, Send)]
    return [one for one in messages if isinstance(one, PrefixBlocksChanged)]


def test_a_request_that_begins_alike_computes_the_rest() -> None:
    made = worker()
    ended(made, 5, 6, 7, 8, 9, 10, 11, 12, 13)
    made.begin(of("second", 5, 6, 7, 8, 9, 10, 11, 12, 20, 21))
    iteration = only(made.follow(Step(second=2)))
    (addition,) = iteration.additions
    assert addition.num_cached == 8
    assert addition.block_ids[:2] == blocks(0, 1)
    assert (iteration.slices, iteration.copies) == (((RequestId("second"), 2),), ())
    commands = made.sampled(second=30)
    (emitted,) = [one.message for one in commands if isinstance(one, SendTo)]
    assert isinstance(emitted, TokensEmitted)
    assert emitted.deltas[0].num_cached_tokens == 8
    assert to_router(PrefillCompleted(RequestId("second"), 1, 2)) in commands
    assert (made.loads[-1].num_prefix_query_tokens, made.loads[-1].num_prefix_hit_tokens) == (9 + 10, 8)


def test_the_policy_sees_what_is_left_and_charges_all_blocks() -> None:
    made = worker()
    ended(made, 5, 6, 7, 8, 9, 10, 11, 12, 13)
    made.begin(of("second", 5, 6, 7, 8, 9, 10, 11, 12, 20, 21))
    made.follow(Step(second=1))
    table, row = made.view.table, made.view.table.row(RequestId("second"))
    assert made.view.memory.num_free == 20
    assert table.num_cached[row] + table.num_remaining[row] == 10


def test_the_same_prompt_again_copies_the_block_of_its_last_token() -> None:
    made = worker()
    ended(made, 5, 6, 7, 8, 9, 10, 11, 12)
    made.begin(of("second", 5, 6, 7, 8, 9, 10, 11, 12))
    iteration = only(made.follow(Step(second=1)))
    (addition,) = iteration.additions
    own = addition.block_ids[1]
    assert addition.num_cached == 7
    assert addition.block_ids[0] == BlockId(0)
    assert iteration.copies == (BlockCopied(BlockId(1), own),)
    assert own != BlockId(1)


def test_other_tenants_and_requests_without_a_root_share_nothing() -> None:
    made = worker()
    ended(made, 5, 6, 7, 8, 9)
    for name, root in (("second", OTHER), ("third", b"")):
        made.begin(of(name, 5, 6, 7, 8, 9, root=root))
        (addition,) = only(made.follow(alone(name, 5))).additions
        assert addition.num_cached == 0
        made.completed(SampledToken(RequestId(name), 2))


def test_a_request_that_scores_its_prompt_computes_all_of_it() -> None:
    made = worker()
    ended(made, 5, 6, 7, 8, 9)
    made.begin(of("second", 5, 6, 7, 8, 9, num_prompt_logprobs=0))
    (addition,) = only(made.follow(Step(second=5))).additions
    assert addition.num_cached == 0


def test_what_two_compute_side_by_side_is_kept_once() -> None:
    made = worker()
    made.begin(of("first", 5, 6, 7, 8, 9))
    made.begin(of("second", 5, 6, 7, 8, 10))
    made.follow(Step(first=5, second=5), Step(first=1, second=1))
    iteration = only(made.sampled(first=20, second=21))
    assert iteration.replacements == (BlockReplacement(RequestId("second"), 0, BlockId(0)),)
    assert made.view.memory.num_free == 20 - 3


def test_running_requests_take_memory_from_the_cache() -> None:
    made = worker(num_blocks=5)
    ended(made, *range(5, 14))
    made.begin(of("second", *range(100, 110), root=b""))
    made.follow(Step(second=10))
    made.sampled(second=50)
    assert made.loads[-1].num_free_blocks == 2
    made.begin(of("third", *range(200, 206), root=b""))
    (addition,) = only(made.follow(Step(third=6))).additions
    assert len(addition.block_ids) == 2  # one of them was cached
    changed = [one.message for one in made.sampled(third=50) if isinstance(one, Send)]
    assert made.loads[-1].num_free_blocks == 0
    assert not [one for one in changed if isinstance(one, PrefixBlocksChanged) and one.stored]


def test_a_dropped_request_comes_back_to_what_is_left_of_it() -> None:
    made = worker()
    made.begin(of("first", *range(5, 14)))
    made.begin(of("second", 50, 51, 52, root=b""))
    made.follow(Step(first=9), Step(second=3, drop=["first"]), Step(first=2))
    made.sampled(first=30)
    (addition,) = only(made.sampled(second=31)).additions
    assert addition.num_cached == 8
    assert addition.block_ids[:2] == blocks(0, 1)


def test_blocks_of_a_failed_request_are_not_cached() -> None:
    made = worker()
    made.begin(of("first", 5, 6, 7, 8, 9))
    made.follow(Step(first=5))
    made.completed(failed=(RequestId("first"),))
    made.begin(of("second", 5, 6, 7, 8, 9))
    (addition,) = only(made.follow(Step(second=5))).additions
    assert addition.num_cached == 0


def test_a_router_that_is_new_is_told_all() -> None:
    made = worker()
    made.begin(of("first", *range(5, 45)))
    made.follow(*[Step(first=10)] * 4)
    for _ in range(3):
        made.completed()
    commands = made.sampled(first=2)
    assert not [one for one in commands if isinstance(one, Send) and getattr(one.message, "is_complete", False)]
    (changed,) = told(made.do(PeerConnected(Role.ROUTER, ROUTER)))
    assert changed.is_complete
    assert changed.stored


def test_the_router_hears_of_a_prompt_at_once_and_of_an_answer_with_the_tick() -> None:
    made = worker()
    made.begin(of("first", *range(5, 35), max_tokens=40))
    made.follow(Step(first=30), *[Step(first=1)] * 39)
    commands = made.sampled(first=50)
    assert told(commands)
    kinds = [type(one.message) for one in commands if isinstance(one, Send)]
    assert kinds.index(PrefixBlocksChanged) < kinds.index(PrefillCompleted)
    assert not any(told(made.sampled(first=51 + place)) for place in range(38))
    assert told(made.do(Ticked()))
    assert not told(made.do(Ticked()))


def test_without_a_cache_a_root_leaves_no_trace() -> None:
    made = ColocatedHarness()
    for name in ("first", "second"):
        made.begin(of(name, 5, 6, 7, 8, 9))
        (iteration,) = runs(made.follow(alone(name, 5)))
        assert iteration.additions[0].num_cached == 0
        commands = made.completed(SampledToken(RequestId(name), 2))
        assert not [one for one in commands if isinstance(getattr(one, "message", None), PrefixBlocksChanged)]
    assert made.loads[-1].num_prefix_query_tokens == 0
    assert made.view.held_blocks is None
