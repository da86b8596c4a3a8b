"""The router's records of workers and pools, and FormBatch on behalf of decode workers."""

from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage
from alignedserve.core.request import RequestClass
from alignedserve.messages.gateways import GatewayRegistered
from alignedserve.messages.handshake import Role
from alignedserve.messages.pools import PoolLoad, PoolRegistered, RequestPooled
from alignedserve.messages.workers import PrefillCompleted, PrefillRequest, WorkerLoad
from router.state import BatchKind, DispatchedPrefill, TrackedRequest
from router.worker_orders import LongestContexts, is_as_free
from tests.harnesses.placement import RUNNING, busy, decoding, empty_fleet, form, placement, pool_requests, refuse
from tests.harnesses.router import RouterHarness
from tests.support.marks import each
from tests.support.samples import DECODE, GATEWAY, POOL, PREFILL, R1, epoch, request, worker

# --- coming, going, counting


def test_what_is_pooled_counts_as_a_prefill_until_its_worker_reports_it() -> None:
    where = placement()
    where.register(PREFILL, worker(can_prefill=True, can_decode=False))
    tracked = TrackedRequest(request(), GATEWAY, 1.0)
    tracked.move(Stage.PREFILLING, PREFILL)
    where.start_prefill(where.workers[PREFILL], R1, DispatchedPrefill(epoch(1), 4))
    where.set_pooled(tracked, POOL, 1)
    assert where.workers[PREFILL].num_prefill_tokens == 4


def test_reports_of_the_unknown_are_ignored() -> None:
    where = placement()
    where.update_load("decode-9", WorkerLoad())
    where.update_load("pool-9", PoolLoad(1, 1, 1))
    assert "decode-9" not in where
    assert "pool-9" not in where
    assert POOL in where


def test_who_has_other_blocks_than_the_others_is_refused() -> None:
    where = empty_fleet()
    assert where.register(POOL, PoolRegistered(100, "digest")) is None
    assert where.register(DECODE, worker(layout_digest="digest")) is None
    reason = where.register(PREFILL, worker(can_prefill=True, can_decode=False, layout_digest="another"))
    assert reason is not None
    assert "blocks" in reason
    assert PREFILL not in where


# --- questions: when none is asked


def test_without_news_the_question_is_not_repeated() -> None:
    where = placement(decode_0={})
    pool_requests(where, 3)
    where.batches_to_form(0.0)
    refuse(where)
    assert where.batches_to_form(0.0) == []
    where.clear_refusals()
    assert where.batches_to_form(0.0) == form(2, 20, 3, 2)


def test_a_request_that_comes_into_the_pool_is_news() -> None:
    where = placement(decode_0={})
    pool_requests(where, 1)
    where.batches_to_form(0.0)
    refuse(where)
    pool_requests(where, 1, "q")
    assert len(where.batches_to_form(0.0)) == 1


# --- batches


def test_no_more_are_demanded_than_there_are() -> None:
    where = placement(decode_0={})
    pool_requests(where, 2)
    assert where.batches_to_form(0.0) == form(1, 20, 2, 2)


def test_workers_share_the_pool_fairly_and_the_emptiest_is_asked_first() -> None:
    where = placement(decode_0={}, decode_1={})
    decoding(where, "decode-0", 1)
    pool_requests(where, 3)
    asked = where.batches_to_form(0.0)
    assert [form.worker for _, form in asked] == ["decode-1", "decode-0"]
    assert [form.max_requests for _, form in asked] == [2, 2]


def test_a_worker_that_runs_too_few_gets_what_it_has_places_for() -> None:
    assert busy(9, num_running=1).batches_to_form(0.0) == form(1, 8, 4 + 2 - 3, 2)


def test_a_busy_worker_is_given_a_whole_batch_ahead_of_need() -> None:
    assert busy(9).batches_to_form(0.0) == form(1, 8, 4, 2)


def test_a_worker_whose_candidates_take_their_share_is_not_asked_for_more() -> None:
    assert busy(9, num_candidate_blocks=8).batches_to_form(0.0) == []


def test_a_busy_worker_is_not_given_what_is_not_worth_a_switch() -> None:
    assert busy(1).batches_to_form(0.0) == []


def test_what_is_not_worth_a_switch_is_given_after_a_while() -> None:
    assert busy(1, now=5.0).batches_to_form(6.9) == []
    assert busy(1, now=5.0).batches_to_form(7.0) == form(1, 8, 1, 1)


def test_a_request_larger_than_any_batch_for_a_busy_worker_gets_one_when_it_has_waited_too_long() -> None:
    where = busy(2, now=1.0)
    pool_requests(where, 1, "large", num_blocks=9)  # a batch for a busy worker has eight
    assert where.batches_to_form(1.9) == form(1, 8, 3, 2)
    refuse(where)
    where.clear_refusals()
    assert where.batches_to_form(2.0) == form(2, 9, 3, 2)


def test_a_worker_with_all_the_requests_it_may_have_is_not_asked_for_more() -> None:
    where = placement({"policy": "fcfs"}, decode_0={})
    decoding(where, DECODE, 6)
    pool_requests(where, 1)
    assert where.batches_to_form(0.0) == []


# --- joins


def test_who_is_of_the_running_lengths_joins_while_another_batch_waits() -> None:
    where = busy(9, num_batch_candidates=3, num_candidate_blocks=2, running=RUNNING)
    assert where.batches_to_form(0.0) == form(1, 8 - 2, 1 + 2, 1, joins=RUNNING)


def test_who_is_of_the_running_lengths_joins_when_there_is_no_batch_to_come() -> None:
    where = busy(9, running=RUNNING)
    assert where.batches_to_form(0.0) == form(1, 8, 4, 2)
    refuse(where)
    assert where.batches_to_form(0.0) == form(2, 8, 3, 1, joins=RUNNING)
    refuse(where)
    assert where.batches_to_form(0.0) == []


def test_no_request_joins_while_another_batch_has_waited_too_long() -> None:
    for now, expected in ((6.9, 1), (7.0, 0)):
        assert len(busy(9, now=5.0, num_batch_candidates=3, running=RUNNING).batches_to_form(now)) == expected


def test_a_join_is_no_batch_of_its_own() -> None:
    where = busy(1, running=RUNNING)
    where.batches_to_form(1.0)
    record = where.workers[DECODE]
    assert record.requested_kind is BatchKind.JOIN
    where.close_batch_request(record, is_empty=False, now=1.5)
    assert (record.last_batch_s, record.is_load_stale) == (0.0, True)


def test_chat_goes_where_least_chat_decodes_whatever_documents_do() -> None:
    where = placement(**{f"elastic_{number}": {"can_prefill": True, "can_move": True} for number in range(2)})
    for name, count, is_real_time in (("elastic-0", 1, True), ("elastic-1", 3, False)):
        for one in decoding(where, name, count):
            if not is_real_time:
                where.workers[name].decoding_real_time.discard(one.request.request_id)
        where.clear_refusals()
        where.update_load(name, WorkerLoad())
    least = where.least_loaded_prefiller(is_real_time=True)
    assert least is not None
    assert least.name == "elastic-1"
    other = where.least_loaded_prefiller()
    assert other is not None
    assert other.name == "elastic-0"


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
    assert targets(prefill_nodes(allowance=12), 3, prompt_len=8) == ["prefill-1", "prefill-0"]


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


def _longest(workers: LongestContexts, *, prompt_len: int) -> int:
    """Return the longest context that fits, of a request with this prompt; 0: none does."""
    fit = [count for count in range(1, 200) if workers.can_hold(request(prompt_len=prompt_len, max_tokens=count))]
    return prompt_len + fit[-1] if fit else 0


@each(("state_blocks", "longest"), [(0, 80), (3, 68), (20, 0)])
def test_a_request_must_fit_some_decode_worker_beside_its_states(state_blocks: int, longest: int) -> None:
    sizes = {
        name: {"num_blocks": num_blocks, "state_blocks": state_blocks}
        for name, num_blocks in (("decode_0", 20), ("decode_1", 10))
    }
    assert _longest(placement(**sizes).longest_contexts, prompt_len=4) == longest


def test_a_prompt_must_fit_some_prefill_worker_and_its_answer_need_not() -> None:
    where = placement(decode={})
    where.register("prefill-0", worker(can_prefill=True, can_decode=False, num_blocks=5))
    where.register("prefill-1", worker(can_prefill=True, can_decode=False, num_blocks=10))
    assert _longest(where.longest_contexts, prompt_len=40) == 80
    assert _longest(where.longest_contexts, prompt_len=41) == 0
    where.remove("prefill-1")
    assert _longest(where.longest_contexts, prompt_len=21) == 0
    where.remove("prefill-0")
    assert _longest(where.longest_contexts, prompt_len=41) == 80  # one may come
