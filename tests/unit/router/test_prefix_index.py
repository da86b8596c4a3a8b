"""Holders of cached blocks, and prompts that go to them."""

from typing import Any

from alignedserve.core.ids import RequestId
from alignedserve.core.request import RequestClass, SamplingParams
from alignedserve.messages.events import Send
from alignedserve.messages.gateways import AbortRequest, GatewayRegistered, ResumeRequest, SubmitRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.pools import PoolRegistered
from alignedserve.messages.prefixes import PrefixBlocksChanged
from alignedserve.messages.workers import PrefillCompleted, PrefillRequest, WorkerLoad
from router.prefix_index import PrefixIndex
from router.state import DispatchedPrefill
from tests.harnesses.router import RouterHarness
from tests.support.marks import each
from tests.support.samples import GATEWAY, epoch, request, worker

FIRST, SECOND = "decode-0", "decode-1"
BLOCK_SIZE = 4


def names(*blocks: int) -> tuple[bytes, ...]:
    """Return names of blocks of which the router is told; it is not of those below 0."""
    return tuple(bytes([abs(block)]) * 7 + (b"\xff" if block < 0 else b"\0") for block in blocks)


def joined(*blocks: int) -> bytes:
    return b"".join(names(*blocks))


def holding(index: PrefixIndex, worker_name: str, *blocks: int, is_complete: bool = False) -> None:
    index.update(worker_name, PrefixBlocksChanged(names(*blocks), is_complete=is_complete))


# --- the index


def test_runs_end_where_a_block_is_missing() -> None:
    index = PrefixIndex()
    holding(index, "a", 1, 2, 3)
    holding(index, "b", 1, 3, 4)
    holding(index, "c", 2)
    assert index.runs(joined(1, 2, 3, 4)) == {"a": 3, "b": 1}
    assert index.runs(joined(2)) == {"a": 1, "c": 1}
    assert index.runs(joined(9, 1)) == {}
    assert index.runs(b"") == {}


def test_blocks_of_which_nobody_tells_neither_end_a_run_nor_count() -> None:
    index = PrefixIndex()
    holding(index, "a", 1, 2)
    index.expect("b", joined(-7, -8))
    assert index.runs(joined(-7, 1, -8, -9, 2, -3)) == {"b": 1, "a": 5}
    assert index.runs(joined(-7, -8, -9)) == {"b": 2}
    assert index.runs(joined(-6, -5)) == {}


def test_removed_blocks_are_forgotten_and_those_also_stored_stay() -> None:
    index = PrefixIndex()
    holding(index, "a", 1, 2, 3)
    index.update("a", PrefixBlocksChanged(stored=names(3, 4), removed=names(2, 3, 7)))
    assert index.runs(joined(1, 2)) == {"a": 1}
    assert index.runs(joined(3, 4)) == {"a": 2}
    assert len(index) == 3


def test_a_complete_report_replaces_all_before_it() -> None:
    index = PrefixIndex()
    holding(index, "a", 1, 2)
    holding(index, "b", 1)
    holding(index, "a", 5, is_complete=True)
    assert index.runs(joined(1)) == {"b": 1}
    assert index.runs(joined(5)) == {"a": 1}


def test_what_is_expected_counts_until_it_is_settled() -> None:
    index = PrefixIndex()
    holding(index, "a", 1)
    index.expect("a", joined(2, 3))
    index.expect("b", joined(1, 2))
    assert index.runs(joined(1, 2, 3)) == {"a": 3, "b": 2}
    assert index.runs(joined(1, 2, 4)) == {"a": 2, "b": 2}
    index.settle("a", joined(2, 3))
    assert index.runs(joined(1, 2, 3)) == {"a": 1, "b": 2}
    index.settle("b", joined(1, 2))
    assert index.runs(joined(1, 2, 3)) == {"a": 1}


def test_a_lost_worker_is_forgotten_and_its_place_is_taken_by_another() -> None:
    index = PrefixIndex()
    holding(index, "a", 1)
    holding(index, "b", 1, 2)
    index.forget("a")
    index.forget("unknown")
    holding(index, "c", 2)
    assert index.runs(joined(1, 2)) == {"b": 2}
    assert index.runs(joined(2)) == {"b": 1, "c": 1}
    assert len(index) == 3


def test_memory_is_bounded() -> None:
    index = PrefixIndex(max_names=3)
    holding(index, "a", 1, 2)
    holding(index, "b", 1, 2)
    assert len(index) == 3
    assert index.runs(joined(1, 2)) == {"a": 2, "b": 1}
    index.forget("a")
    holding(index, "b", 2)
    assert index.runs(joined(1, 2)) == {"b": 2}


# --- placement


def two_workers(**changes: Any) -> RouterHarness:
    made = RouterHarness()
    for name in (FIRST, SECOND):
        made.hear(name, worker(can_prefill=True, max_running_requests=64, num_blocks=10_000, **changes))
        made.hear(name, WorkerLoad(prompt_tokens_per_s=5000))
    return made


def submit(made: RouterHarness, number: int, blocks: bytes, *, num_tokens: int = 40, max_tokens: int = 8) -> str:
    """Submit a request; return the worker that gets it."""
    changes: dict[str, Any] = {"request_class": RequestClass.BEST_EFFORT} if number % 2 else {}
    of = request(f"r{number}", prompt_len=num_tokens, sampling=SamplingParams(max_tokens=max_tokens), **changes)
    return worker_in(made.hear(GATEWAY, SubmitRequest(of, blocks)))


def worker_in(sent: list[Send]) -> str:
    (target,) = [send.peer for send in sent if isinstance(send.message, PrefillRequest)]
    return target


def test_a_prompt_goes_where_it_is_cached() -> None:
    made = two_workers()
    made.hear(SECOND, PrefixBlocksChanged(names(1, 2, 3)))
    assert submit(made, 0, joined(1, 2, 3, 4)) == SECOND
    assert submit(made, 1, joined(7, 8)) == FIRST


def test_load_outweighs_a_short_run() -> None:
    made = two_workers()
    made.hear(SECOND, PrefixBlocksChanged(names(1)))
    assert submit(made, 0, joined(1), num_tokens=1000) == SECOND
    assert submit(made, 2, joined(1, 2), num_tokens=1000) == FIRST  # 996 tokens before it are more than four


@each(("max_tokens", "target"), [(32, SECOND), (1000, FIRST)])
def test_the_example_of_the_page(max_tokens: int, target: str) -> None:
    """Prompts that are cached cost iterations all the same."""
    made = two_workers()
    number = 0
    for name, count in ((FIRST, 4), (SECOND, 10)):
        other = SECOND if name == FIRST else FIRST
        for _ in range(count):
            made.logic._placement.workers[name].decoding.add(RequestId(f"d{number}-{other}"))
            number += 1
    blocks = tuple(number.to_bytes(7, "big") + b"\0" for number in range(250))
    made.hear(SECOND, PrefixBlocksChanged(blocks))
    assert submit(made, 0, b"".join(blocks), num_tokens=1060, max_tokens=max_tokens) == target


@each(("num_waiting", "target"), [(2900, SECOND), (3000, FIRST)])
def test_a_history_is_worth_three_times_its_tokens_of_waiting(num_waiting: int, target: str) -> None:
    made = two_workers()
    blocks = tuple(number.to_bytes(7, "big") + b"\0" for number in range(250))
    made.hear(SECOND, PrefixBlocksChanged(blocks))
    placement = made.logic._placement
    ahead = DispatchedPrefill(1, num_waiting, is_real_time=True)
    placement.start_prefill(placement.workers[SECOND], RequestId("ahead"), ahead)
    assert submit(made, 0, b"".join(blocks), num_tokens=1060) == target


def test_what_arrives_together_follows_the_first() -> None:
    """Nobody has computed the instruction yet; only the first has it to compute."""
    made = two_workers()
    common = tuple(number.to_bytes(8, "big") for number in range(200))
    targets = [submit(made, n, b"".join((*common, bytes([255, n]) * 4)), num_tokens=820) for n in (1, 3, 5, 7, 11, 13)]
    assert len(set(targets)) == 1
    record = made.logic._placement.workers[targets[0]]
    assert record.num_prefill_tokens == 820 + 5 * 20
    assert submit(made, 9, b"", num_tokens=820) != targets[0]


def test_a_prompt_that_is_not_computed_is_expected_no_more() -> None:
    made = two_workers()
    assert submit(made, 0, joined(1, 2)) == FIRST
    made.hear(GATEWAY, AbortRequest(RequestId("r0")))
    assert made.logic._placement.prefixes.runs(joined(1)) == {}
    assert submit(made, 2, joined(1, 2)) == FIRST
    made.hear(FIRST, PrefillCompleted(RequestId("r2"), epoch(2), 40))
    assert made.logic._placement.prefixes.runs(joined(1)) == {}
    assert submit(made, 4, joined(1, 2)) == SECOND
    made.lose(SECOND)
    assert made.logic._placement.prefixes.runs(joined(1)) == {}


def test_a_worker_that_drains_gets_none_of_its_own_prompts() -> None:
    made = two_workers()
    made.hear(SECOND, PrefixBlocksChanged(names(1, 2)))
    made.logic._placement.set_draining([SECOND])
    assert submit(made, 0, joined(1, 2)) == FIRST


def test_a_resumed_request_goes_where_its_tokens_are() -> None:
    made = two_workers()
    made.hear(SECOND, PrefixBlocksChanged(names(1, 2, 3)))
    resumed = ResumeRequest(request("r0", prompt_len=8), (5,) * 6, 0, joined(1, 2, 3))
    assert worker_in(made.hear(GATEWAY, resumed)) == SECOND


def test_a_worker_near_the_gateway_with_less_cached_is_passed_over() -> None:
    made = RouterHarness()
    made.hear(GATEWAY, GatewayRegistered("here"))
    for name, node in ((FIRST, "there"), (SECOND, "here")):
        made.hear(name, worker(can_prefill=True, max_running_requests=16, node=node))
    made.hear(FIRST, PrefixBlocksChanged(names(1, 2)))
    assert submit(made, 0, joined(1, 2)) == FIRST
    assert submit(made, 2, joined(5)) == SECOND


def test_a_prompt_goes_to_the_node_whose_pool_has_it() -> None:
    made = RouterHarness()
    for number in range(2):
        made.hear(f"pool-{number}", PoolRegistered(100))
        made.hear(f"decode-{number}", worker(can_prefill=True, max_running_requests=16, pool_name=f"pool-{number}"))
    made.hear("pool-1", PrefixBlocksChanged(names(1, 2)))
    assert submit(made, 0, joined(1, 2, 3)) == SECOND
    made.hear(FIRST, PrefixBlocksChanged(names(4, 5)))
    made.hear("pool-1", PrefixBlocksChanged(names(4, 5)))
    assert submit(made, 2, joined(4, 5, 6)) == FIRST  # loading costs something
    made.lose("pool-1")
    assert set(made.logic._placement.prefixes.runs(joined(1, 2))) == {SECOND}  # is computing them


def test_reports_of_strangers_are_ignored() -> None:
    made = two_workers()
    made.hear("decode-7", PrefixBlocksChanged(names(1)))
    assert len(made.logic._placement.prefixes) == 0


def two_pools() -> RouterHarness:
    """Two nodes with a pool of prefix blocks and a worker each; blocks of 64 tokens."""
    made = RouterHarness()
    for number in range(2):
        made.link(f"pool-{number}", Role.KV_POOL)
        made.hear(
            f"decode-{number}",
            worker(can_prefill=True, max_running_requests=1, pool_name=f"pool-{number}", block_size=64),
        )
    return made


def far_pools(made: RouterHarness, number: int, block_names: bytes) -> list[str | None]:
    commands = made.hear(GATEWAY, SubmitRequest(request(f"r{number}", prompt_len=400), block_names))
    sent = [one.message for one in commands if isinstance(one, Send)]
    return [one.prefix_pool for one in sent if isinstance(one, PrefillRequest)]


def test_the_pool_of_another_node_is_named_where_it_has_clearly_more() -> None:
    made = two_pools()
    made.hear("pool-1", PrefixBlocksChanged(names(1, 2, 3, 4, 5)))
    made.hear("pool-0", PrefixBlocksChanged(names(1)))
    assert far_pools(made, 0, joined(1, 2, 3, 4, 5)) == [None]  # it goes to that node
    assert far_pools(made, 1, joined(1, 2, 3, 4, 5)) == ["pool-1"]  # whose worker is full


def test_a_pool_that_is_lost_is_named_no_more() -> None:
    made = two_pools()
    made.hear("pool-1", PrefixBlocksChanged(names(1, 2, 3, 4, 5)))
    far_pools(made, 0, joined(1, 2, 3, 4, 5))
    made.lose("pool-1")
    assert far_pools(made, 1, joined(1, 2, 3, 4, 5)) == [None]
