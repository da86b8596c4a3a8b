"""Prompts go to prefill workers whose pool has room for them, while one of those can take them."""

from alignedserve.core.request import Request
from alignedserve.messages.events import Send
from alignedserve.messages.pools import PoolLoad, PoolRegistered
from alignedserve.messages.workers import PrefillRequest
from tests.harnesses.router import RouterHarness
from tests.support.samples import POOL, PREFILL, request, worker

OTHER_POOL, OTHER_PREFILL = "pool-1", "prefill-1"
FULL = PoolLoad(num_blocks_used=100, num_pooled=9, num_reserved=1)
ROOMY = PoolLoad(num_blocks_used=90, num_pooled=9, num_reserved=0)


def two_nodes() -> RouterHarness:
    made = RouterHarness(max_prefill_tokens_per_worker=8)
    for pool, prefiller in ((POOL, PREFILL), (OTHER_POOL, OTHER_PREFILL)):
        made.hear(pool, PoolRegistered(100))
        made.hear(prefiller, worker(can_prefill=True, can_decode=False, pool_name=pool))
    return made


def prompt(number: int) -> Request:
    return request(f"r{number}")


def targets(commands: list[Send]) -> list[str]:
    return [command.peer for command in commands if isinstance(command.message, PrefillRequest)]


def test_a_prompt_goes_where_the_pool_has_room_however_busy_its_worker() -> None:
    made = two_nodes()
    made.hear(POOL, FULL)
    assert targets(made.submit(prompt(1))) == [OTHER_PREFILL]
    assert targets(made.submit(prompt(2))) == [OTHER_PREFILL]


def test_a_worker_beside_a_full_pool_computes_what_no_other_can_take_now() -> None:
    made = two_nodes()
    made.hear(POOL, FULL)
    assert targets([*made.submit(prompt(1)), *made.submit(prompt(2))]) == [OTHER_PREFILL, OTHER_PREFILL]
    assert targets(made.submit(prompt(3))) == [PREFILL]  # the other has as many tokens as it may


def test_a_pool_that_has_room_again_is_as_good_as_others() -> None:
    made = two_nodes()
    made.hear(POOL, FULL)
    made.hear(POOL, ROOMY)
    assert targets(made.submit(prompt(1))) == [PREFILL]


def test_where_all_pools_are_full_the_least_loaded_worker_computes_next() -> None:
    made = two_nodes()
    made.hear(POOL, FULL)
    made.hear(OTHER_POOL, FULL)
    assert targets([*made.submit(prompt(1)), *made.submit(prompt(2))]) == [PREFILL, OTHER_PREFILL]
