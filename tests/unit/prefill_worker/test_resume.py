"""The prefill worker begins from the copy that the pool kept of an earlier attempt, as far as it can be used."""

from alignedserve.core.ids import LeaseId
from alignedserve.core.request import Request
from alignedserve.messages.caches import (
    BlocksReserved,
    BlocksWritten,
    CopyGranted,
    CopyMissing,
    FetchCopy,
    LeasesReleased,
)
from alignedserve.messages.events import PeerDisconnected, Send
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import Load, LoadBlocks, MapArena, OffloadBlocks
from alignedserve.messages.workers import PrefillCompleted
from alignedserve.worker_core.part import WorkerCommand
from tests.harnesses.prefill import ARENA, EOS, PrefillHarness, added, run, to_pool, to_router, token
from tests.support.marks import each
from tests.support.samples import POOL, R1, blocks, handoff, request

HAS = (7, 8, 9)  # what the client has of the answer; with the prompt, seven tokens
RELEASED = to_pool(LeasesReleased((LeaseId(30),)))


def asking() -> PrefillHarness:
    """Resume a request with three tokens, for which the pool is asked for a copy."""
    made = PrefillHarness()
    made.begin(request(), 2, *HAS, has_copy=True)
    return made


def grant(made: PrefillHarness, generated: tuple[int, ...] = (7, 8), of: Request | None = None) -> list[WorkerCommand]:
    """Grant a copy of an earlier attempt that had come so far; the last token is not in the cache."""
    copy = handoff(of or request(), 30, attempt=1, generated=generated)
    return made.hear(CopyGranted(copy, 2), POOL)


def loading(generated: tuple[int, ...] = (7, 8)) -> LoadBlocks:
    copy = handoff(request(), 30, generated=generated).copy
    return LoadBlocks(POOL, (Load(R1, copy, blocks(0, 1)),))


def begun(num_cached: int) -> list[WorkerCommand]:
    return [run(added(request(), 0, 1, generated=HAS, num_cached=num_cached), slices={"r1": 7 - num_cached})]


COMPUTES_ALL = begun(0)


def test_the_pool_is_not_asked_before_there_are_blocks_for_it() -> None:
    made = PrefillHarness(max_running_requests=1)
    made.begin(request("r2"))
    assert made.begin(request(), 2, *HAS, has_copy=True) == []  # a granted copy is not given up for room
    assert to_pool(FetchCopy(R1, 2)) in made.sampled(token(EOS, "r2"))


def test_the_copy_is_loaded() -> None:
    assert grant(asking()) == [loading()]


@each(
    ("generated", "num_cached"),
    [
        ((7,), 4),  # the prompt only
        ((7, 8), 5),
        ((7, 8, 9), 6),
        ((7, 8, 9, 5), 6),  # one token is always left to compute
        ((7, 8, 5), 6),  # the token that differs is not in the cache
    ],
)
def test_what_is_cached_is_not_computed_again(generated: tuple[int, ...], num_cached: int) -> None:
    made = asking()
    (command,) = grant(made, generated)
    assert isinstance(command, LoadBlocks)
    assert made.loaded(command) == [*begun(num_cached), RELEASED]


@each("generated", [(7, 5, 9), (5, 8, 9, 9)])
def test_a_copy_of_other_tokens_than_the_client_has_is_not_used(generated: tuple[int, ...]) -> None:
    assert grant(asking(), generated) == [*COMPUTES_ALL, RELEASED]


def test_a_copy_of_another_prompt_is_not_used() -> None:
    assert grant(asking(), of=request(prompt_len=5)) == [*COMPUTES_ALL, RELEASED]


def test_a_copy_of_more_blocks_than_the_context_is_not_used() -> None:
    assert grant(asking(), (7, 8, 9, 1, 2, 3)) == [*COMPUTES_ALL, RELEASED]


def test_a_copy_that_does_not_verify_is_not_used() -> None:
    made = asking()
    grant(made)
    assert made.loaded(loading(), R1) == [*COMPUTES_ALL, RELEASED]


def test_without_a_copy_everything_is_computed() -> None:
    assert asking().hear(CopyMissing(R1, 2), POOL) == COMPUTES_ALL


def test_all_tokens_are_told_to_the_router_as_computed() -> None:
    made = asking()
    grant(made)
    made.loaded(loading())
    assert to_router(PrefillCompleted(R1, 2, 7)) in made.sampled(token(6))


# --- stale word


def test_word_for_an_earlier_attempt_that_there_is_none_changes_nothing() -> None:
    made = asking()
    assert made.hear(CopyMissing(R1, 1), POOL) == []
    assert grant(made) == [loading()]


def test_given_again_while_it_is_asked_for_the_later_attempt_asks_anew() -> None:
    made = asking()
    assert made.begin(request(), 3, *HAS, has_copy=True) == [to_pool(FetchCopy(R1, 3))]
    assert grant(made) == [RELEASED]


# --- aborts and losses


def lose_pool(made: PrefillHarness) -> list[WorkerCommand]:
    return made.do(PeerDisconnected(Role.KV_POOL, POOL))


def test_aborted_while_it_is_loaded_its_blocks_are_freed_after_that() -> None:
    made = asking()
    grant(made)
    assert made.hear(AbortRequest(R1)) == []
    assert made.loaded(loading()) == [RELEASED]
    assert made.free_blocks() == 12


def test_given_again_while_it_is_loaded_it_begins_anew_after_that() -> None:
    made = asking()
    grant(made)
    assert made.begin(request(), 3, *HAS) == []
    assert made.loaded(loading()) == [*COMPUTES_ALL, RELEASED]


def test_the_pool_is_lost_while_it_is_asked() -> None:
    assert lose_pool(asking()) == COMPUTES_ALL


def test_the_pool_is_lost_and_back_while_it_is_loaded() -> None:
    made = asking()
    grant(made)
    lose_pool(made)
    assert made.hear(ARENA, POOL) == [MapArena(POOL, ARENA)]
    commands = made.loaded(loading())
    assert commands[:1] == begun(5)
    assert [one for one in commands if isinstance(one, Send)] == [RELEASED]  # of a lease that the new pool ignores


def test_an_answer_that_has_begun_leaves_as_far_as_it_is() -> None:
    made = PrefillHarness()
    made.begin(request(), 2, *HAS, begun_s=4.5)
    made.sampled(token(5))
    commands = made.hear(BlocksReserved(R1, 2, LeaseId(1), 1, blocks(5, 6)), POOL)
    (copying,) = [one for one in commands if isinstance(one, OffloadBlocks)]
    told = [one.message for one in made.copied(copying) if isinstance(one, Send)]
    assert [one.begun_s for one in told if isinstance(one, BlocksWritten)] == [4.5]
