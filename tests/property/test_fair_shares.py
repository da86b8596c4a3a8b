"""Random histories of tenants: what those that always wait get by weight differs by a bounded amount, as docs say."""

import random
from itertools import accumulate
from typing import Any

from alignedserve.core.class_floor import TurnClass
from alignedserve.core.fair_shares import MAX_IDLE_TENANTS, SHARED_S, FairShares
from alignedserve.core.ids import RequestId
from alignedserve.core.request import RequestClass
from kvpool.policies import make_batch_former
from kvpool.policies.batch_former import BatchLimits
from kvpool.state import PooledRequest
from router.policies import LeastSlackOrder
from router.prefill_queue import DEADLINE_LEAD, PrefillQueue
from tests.support.marks import each
from tests.support.samples import request

WEIGHTS = {"a": 2.0, "b": 1.0, "c": 0.5, "d": 3.0}
MAX_COST = 500.0


@each("seed", range(30))
def test_tenants_that_always_wait_get_alike_by_weight(seed: int) -> None:
    rng, shares = random.Random(seed), FairShares()
    backlogged, others = ("a", "b"), ("c", "d")
    for tenant in backlogged:
        shares.wait(tenant, WEIGHTS[tenant], 0.0)
    service, history = dict.fromkeys(WEIGHTS, 0.0), []
    waiting = dict.fromkeys(others, 0)
    for _ in range(2000):
        tenant = rng.choice(others)
        if rng.random() < 0.3:
            shares.wait(tenant, WEIGHTS[tenant], 0.0)
            waiting[tenant] += 1
        first, cost = shares.first, rng.uniform(1, MAX_COST)
        assert first is not None
        if first in others:
            shares.stop_waiting(first)
            waiting[first] -= 1
        shares.charge(first, cost)
        service[first] += cost / WEIGHTS[first]
        history.append(service["a"] - service["b"])
    most = MAX_COST / min(WEIGHTS[one] for one in backlogged)
    assert max(history) - min(history) <= 2 * most


@each("seed", range(10))
def test_deadlines_add_at_most_their_lead(seed: int) -> None:
    rng, queue, now = random.Random(seed), PrefillQueue(LeastSlackOrder()), 0.0
    sent = dict.fromkeys(("a", "b"), 0)
    service, history = dict.fromkeys(sent, 0.0), []
    requests = {}

    def push(tenant: str, due_s: float) -> None:
        sent[tenant] += 1
        one = request(f"{tenant}{sent[tenant]}", rng.randrange(1, 200), arrival_s=now, tenant=tenant)
        requests[one.request_id] = one
        queue.push(one, one.prompt_len, due_s)

    for tenant in sent:
        for _ in range(50):
            push(tenant, now + 1.0)
    for _ in range(1000):
        now += 0.1
        turn, *_ = queue.turns(now)
        chosen = requests[turn.request_id]
        queue.take(turn.request_id, now)
        # What a has asked for is always on time, what b has is always late.
        push(chosen.tenant, now + 100.0 if chosen.tenant == "a" else now)
        queue.charge(chosen, chosen.prompt_len)
        service[chosen.tenant] += chosen.prompt_len
        history.append(service["a"] - service["b"])
    assert max(history) - min(history) <= 2 * (200 + DEADLINE_LEAD)
    assert max(history) > DEADLINE_LEAD / 2  # deadlines did go first, as far as they may


def test_who_was_idle_comes_back_without_credit() -> None:
    shares = FairShares()
    shares.wait("busy", 1.0, 0.0)
    for _ in range(100):
        shares.charge("busy", 10.0)
    shares.wait("late", 1.0, 0.0)
    assert shares.lead("busy") == 0.0
    turns = []
    for _ in range(10):
        turns.append(shares.first)
        shares.charge(turns[-1] or "", 10.0)
    assert turns.count("late") == 5
    assert turns[0] == "late"


def test_a_class_is_shared_for_a_minute_after_another_has_asked() -> None:
    shares = FairShares()
    for now in (0.0, 10.0):
        shares.wait("a", 1.0, now)
        shares.stop_waiting("a")
    assert not shares.is_shared(10.0)
    shares.wait("b", 1.0, 20.0)
    assert shares.is_shared(20.0)
    shares.stop_waiting("b")
    shares.wait("a", 1.0, 79.0)
    assert shares.is_shared(79.0)
    assert not shares.is_shared(20.0 + SHARED_S)


def test_a_tenant_is_behind_until_it_holds_its_share() -> None:
    shares = FairShares()
    for tenant, weight, num_held in (("a", 2.0, 20), ("b", 1.0, 11)):
        shares.wait(tenant, weight, 0.0)
        for _ in range(num_held):
            shares.hold(tenant)
    shares.wait("c", 1.0, 0.0)
    assert [shares.is_behind(tenant) for tenant in ("a", "b")] == [False, False]
    held = []
    while shares.is_behind("c"):
        shares.hold("c")
        held.append("c")
    assert len(held) == 10  # a quarter of 41
    for tenant in held:
        shares.release(tenant)
    assert shares.is_behind("c")


def test_a_tenant_alone_is_behind_nobody() -> None:
    """It would fill the workers, and who asks again a moment later would find no place."""
    shares = FairShares()
    shares.wait("a", 1.0, 0.0)
    assert not shares.is_behind("a")
    shares.hold("a")
    shares.wait("b", 1.0, 0.0)
    assert shares.is_behind("b")


def test_what_was_charged_too_much_is_given_back() -> None:
    shares = FairShares()
    for tenant in ("a", "b"):
        shares.wait(tenant, 1.0, 0.0)
    shares.charge("a", 100.0)
    shares.charge("b", 50.0)
    assert shares.first == "b"
    shares.charge("a", -90.0)
    assert shares.first == "a"


def test_thousands_of_names_are_forgotten() -> None:
    shares = FairShares()
    for number in range(3 * MAX_IDLE_TENANTS):
        shares.wait(f"tenant-{number}", 1.0, 0.0)
        shares.stop_waiting(f"tenant-{number}")
        shares.charge(f"tenant-{number}", 10.0)
    assert len(shares) <= MAX_IDLE_TENANTS + 1


@each("seed", range(10))
def test_one_tenant_is_served_as_if_there_were_no_shares(seed: int) -> None:
    rng = random.Random(seed)
    named, plain = PrefillQueue(LeastSlackOrder(), floor=0.1), PrefillQueue(LeastSlackOrder(), floor=0.1)
    now = 0.0
    for number in range(500):
        now += rng.random() * 0.2
        fields: dict[str, Any] = {
            "arrival_s": now,
            "priority": rng.randrange(-2, 3),
            "request_class": rng.choice(list(RequestClass)),
        }
        length, due_s = rng.randrange(1, 300), now + rng.random()
        named.push(request(f"r{number}", length, tenant="alone", weight=3.0, **fields), length, due_s)
        plain.push(request(f"r{number}", length, **fields), length, due_s)
        while rng.random() < 0.45 and len(plain):
            turns = plain.turns(now)
            assert named.turns(now) == turns
            taken = rng.choice(turns).request_id
            plain.take(taken, now)
            named.take(taken, now)
            named.charge(request(taken, tenant="alone", weight=3.0, **fields), rng.uniform(-50, 100))


@each("seed", range(20))
def test_requests_leave_a_pool_by_turn_whatever_their_lengths(seed: int) -> None:
    """So what tenants have there adds to what they get no more than what may be there (`prefill_choice.py`)."""
    rng = random.Random(seed)
    floor = rng.choice([None, 0.0])
    former = make_batch_former("density_first", block_size=16, starvation_s=2.0, best_effort_floor=floor)
    classes = [TurnClass.ON_TIME] if floor is None else [TurnClass.ON_TIME, TurnClass.BEST_EFFORT]
    waiting: dict[RequestId, PooledRequest] = {}
    for turn in range(1, 300):
        context_len = rng.randrange(1, 2000)
        name = RequestId(f"r{rng.random()}")
        one = PooledRequest(name, context_len, -(-context_len // 16), rng.random(), None, rng.choice(classes), turn)
        waiting[name] = one
        former.insert(one, float(turn))
        if rng.random() < 0.7:
            continue
        limits = BatchLimits(rng.randrange(130, 400), rng.randrange(1, 6), by_turn=True)
        batch = former.form(limits, float(turn))
        assert batch is not None
        in_order = sorted(waiting.values(), key=lambda one: (one.turn_class, one.turn))
        sizes = list(accumulate(one.num_blocks for one in in_order))
        num_taken = sum(size <= limits.max_blocks for size in sizes[: limits.max_requests])
        assert list(batch.request_ids) == [one.request_id for one in in_order[:num_taken]]
        for request_id in batch.request_ids:
            former.remove(request_id)
            del waiting[request_id]
    assert len(waiting) < 300


@each("seed", range(20))
def test_what_is_told_to_be_before_a_request_goes_before_it(seed: int) -> None:
    rng, queue = random.Random(seed), PrefillQueue(LeastSlackOrder())
    requests = {}
    for number in range(60):
        tenant = rng.choice("abd")
        one = request(f"r{number:02}", rng.randrange(10, 60), tenant=tenant, weight=WEIGHTS[tenant])
        requests[one.request_id] = one
        queue.push(one, one.prompt_len, num_answer_tokens=20.0)
    told = {one: queue.num_before(one, 0.0) for one in requests}
    order = []
    while turns := queue.turns(0.0):
        order.append(turns[0].request_id)
        queue.take(order[-1], 0.0)
        queue.charge(requests[order[-1]], requests[order[-1]].prompt_len + 40.0)
    assert [told[one] for one in order] == list(range(60))
