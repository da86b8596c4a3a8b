"""A request goes to a worker on its gateway's node, unless another is clearly freer."""

from alignedserve.core.ids import RequestId
from alignedserve.core.request import RequestClass
from alignedserve.messages.gateways import GatewayRegistered
from alignedserve.messages.handshake import Role
from alignedserve.messages.pools import PoolRegistered, RequestPooled
from alignedserve.messages.workers import PrefillCompleted, PrefillRequest
from router.worker_orders import is_as_free
from tests.harnesses.router import RouterHarness
from tests.support.marks import each
from tests.support.samples import GATEWAY, epoch, request, worker

HERE, THERE = "node-0", "node-1"
NEAR, FAR = "decode-1", "decode-0"  # of equal workers the first by name is taken


def two_nodes(**facts: int) -> RouterHarness:
    """Build a gateway beside a colocated worker, and another worker elsewhere."""
    made = RouterHarness()
    made.hear(GATEWAY, GatewayRegistered(HERE))
    for name, node in ((NEAR, HERE), (FAR, THERE)):
        made.hear(name, worker(can_prefill=True, max_running_requests=16, node=node, **facts))
    return made


def prefill_nodes(allowance: int) -> RouterHarness:
    """Build a gateway beside a prefill worker and its pool, and both elsewhere."""
    made = RouterHarness(max_prefill_tokens_per_worker=allowance)
    made.hear(GATEWAY, GatewayRegistered(HERE))
    for name, pool, node in (("prefill-1", "pool-1", HERE), ("prefill-0", "pool-0", THERE)):
        made.hear(pool, PoolRegistered(100))
        made.hear(name, worker(can_prefill=True, can_decode=False, pool_name=pool, node=node))
    return made


def targets(made: RouterHarness, count: int, **changes: int) -> list[str]:
    """Submit r0, r1 and so on; return who gets them."""
    sent = [made.submit(request(f"r{number}", **changes)) for number in range(count)]
    return [send.peer for sends in sent for send in sends if isinstance(send.message, PrefillRequest)]


def test_equal_workers() -> None:
    assert targets(two_nodes(), 1) == [NEAR]


def test_a_gateway_that_is_nowhere_near() -> None:
    made = two_nodes()
    made.hear(GATEWAY, GatewayRegistered("node-7"))
    assert targets(made, 1) == [FAR]


def test_a_cluster_of_one_host_names_no_nodes() -> None:
    made = RouterHarness()
    made.hear(GATEWAY, GatewayRegistered(""))
    for name in (NEAR, FAR):
        made.hear(name, worker(can_prefill=True))
    assert targets(made, 1) == [FAR]


def test_a_gateway_that_has_not_registered_anew() -> None:
    made = two_nodes()
    made.lose(GATEWAY)
    made.link(GATEWAY, Role.GATEWAY)
    assert targets(made, 1) == [FAR]


def test_one_request_more_is_about_as_free() -> None:
    assert targets(two_nodes(), 4) == [NEAR, NEAR, FAR, NEAR]


def test_the_bound_on_tokens() -> None:
    assert is_as_free(300, 1, 44, 0)
    assert not is_as_free(301, 1, 44, 0)


@each(("requests", "near"), [(0, 1), (7, 8), (8, 10), (16, 19)])
def test_the_bound_on_requests(requests: int, near: int) -> None:
    assert is_as_free(0, near, 0, requests)
    assert not is_as_free(0, near + 1, 0, requests)


def test_a_prompt_that_the_near_worker_has_no_allowance_for() -> None:
    made = prefill_nodes(allowance=12)
    assert targets(made, 3, prompt_len=8) == ["prefill-1", "prefill-0"]


def test_documents_elsewhere_do_not_make_the_near_worker_of_chat_as_free() -> None:
    made = two_nodes(num_blocks=1000)
    assert targets(made, 1, prompt_len=400) == [NEAR]
    made.submit(request("document", prompt_len=2000, request_class=RequestClass.BEST_EFFORT))
    made.submit(request("chat", prompt_len=10))
    assert made.logic._placement.workers[FAR].num_real_time_tokens == 10


def test_a_near_node_that_has_more_to_decode() -> None:
    made, chosen = prefill_nodes(allowance=1000), []
    for number in range(3):
        sent = made.submit(request(f"r{number}"))
        chosen += [send.peer for send in sent if isinstance(send.message, PrefillRequest)]
        made.hear(chosen[-1], PrefillCompleted(RequestId(f"r{number}"), epoch(number + 1), 4))
        made.hear(f"pool-{chosen[-1][-1]}", RequestPooled(RequestId(f"r{number}"), epoch(number + 1, 1), 4, 1))
    assert chosen == ["prefill-1", "prefill-1", "prefill-0"]
