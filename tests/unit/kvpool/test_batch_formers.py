"""Batch formers: what every one must do, and what each decides."""

import random

import pytest

from alignedserve.core.errors import ConfigError
from alignedserve.core.ids import RequestId
from kvpool.policies import BATCH_FORMERS, make_batch_former
from kvpool.policies.batch_former import AlignedBatch, BatchFormer, BatchLimits, FcfsBatchFormer, LengthRange
from kvpool.state import PooledRequest

PLENTY = BatchLimits(max_blocks=10_000, max_requests=100)


def pooled(name: str, context_len: int, arrival_s: float, num_blocks: int | None = None) -> PooledRequest:
    num_blocks = -(-context_len // 16) if num_blocks is None else num_blocks
    return PooledRequest(RequestId(name), context_len, num_blocks, arrival_s, None)


def names(batch: AlignedBatch | None) -> list[str]:
    return list(batch.request_ids) if batch is not None else []


def test_an_unknown_former_fails_listing_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match=r"batching\.policy: unknown batch former 'x'; known: density_first, fcfs"):
        make_batch_former("x", block_size=16, starvation_s=2.0)


# --- every former


@pytest.fixture(params=sorted(BATCH_FORMERS))
def former(request: pytest.FixtureRequest) -> BatchFormer:
    name: str = request.param
    return make_batch_former(name, block_size=16, starvation_s=2.0)


def test_nothing_pooled_gives_no_batch(former: BatchFormer) -> None:
    assert former.form(PLENTY, 0.0) is None


def test_a_batch_says_what_it_holds_shortest_first(former: BatchFormer) -> None:
    for one in (pooled("long", 40, 0.0), pooled("b", 33, 2.0), pooled("a", 33, 2.0), pooled("c", 33, 1.0)):
        former.insert(one, 0.0)
    ids = tuple(map(RequestId, ("c", "a", "b", "long")))
    assert former.form(PLENTY, 3.0) == AlignedBatch(ids, LengthRange(33, 41), 12)


def test_forming_removes_nothing(former: BatchFormer) -> None:
    former.insert(pooled("a", 40, 0.0), 0.0)
    assert names(former.form(PLENTY, 1.0)) == ["a"]
    assert names(former.form(PLENTY, 1.0)) == ["a"]


def test_a_request_larger_than_the_limit_alone_stays_for_a_larger_one(former: BatchFormer) -> None:
    former.insert(pooled("large", 800, 0.0), 0.0)
    assert former.form(BatchLimits(49, 10), 100.0) is None
    assert names(former.form(BatchLimits(50, 10), 100.0)) == ["large"]


@pytest.mark.parametrize("limits", [BatchLimits(0, 10), BatchLimits(10, 0), BatchLimits(2, 10)])
def test_limits_that_no_request_fits_give_no_batch(former: BatchFormer, limits: BatchLimits) -> None:
    former.insert(pooled("a", 48, 0.0), 0.0)
    assert former.form(limits, 1.0) is None


def test_inserting_twice_is_a_broken_invariant(former: BatchFormer) -> None:
    former.insert(pooled("a", 40, 0.0), 0.0)
    with pytest.raises(AssertionError, match="pooled twice"):
        former.insert(pooled("a", 40, 0.0), 0.0)


def test_removing_the_unknown_is_a_broken_invariant(former: BatchFormer) -> None:
    with pytest.raises((KeyError, AssertionError)):
        former.remove(RequestId("a"))


def test_random_histories_keep_the_limits_and_end_empty(former: BatchFormer) -> None:
    rng = random.Random(3)
    there: dict[str, PooledRequest] = {}
    for number in range(400):
        one = pooled(f"r{number}", rng.randrange(1, 500), rng.randrange(50))
        former.insert(one, 0.0)
        there[one.request_id] = one
        limits = BatchLimits(rng.randrange(1, 60), rng.randrange(1, 12))
        batch = former.form(limits, float(number))
        if batch is None or rng.random() < 0.5:
            continue
        members = [there.pop(name) for name in batch.request_ids]
        assert len(members) <= limits.max_requests
        assert batch.num_blocks == sum(member.num_blocks for member in members) <= limits.max_blocks
        assert [member.context_len for member in members] == sorted(member.context_len for member in members)
        assert all(batch.lengths.start <= member.context_len < batch.lengths.stop for member in members)
        for member in members:
            former.remove(member.request_id)
    while (batch := former.form(PLENTY, 1000.0)) is not None:
        for request_id in batch.request_ids:
            del there[request_id]
            former.remove(request_id)
    assert there == {}


# --- first come, first served


def test_fcfs_as_in_its_docstring() -> None:
    former = FcfsBatchFormer()
    for number, context_len in enumerate((900, 40, 50)):
        former.insert(pooled(str(context_len), context_len, float(number)), 0.0)
    assert names(former.form(BatchLimits(10_000, 2), 3.0)) == ["40", "900"]


def test_fcfs_lets_no_request_overtake_one_that_does_not_fit() -> None:
    former = FcfsBatchFormer()
    former.insert(pooled("first", 16, 0.0), 0.0)
    former.insert(pooled("large", 800, 1.0), 0.0)
    former.insert(pooled("small", 16, 2.0), 0.0)
    assert names(former.form(BatchLimits(10, 10), 3.0)) == ["first"]
    former.remove(RequestId("first"))
    assert former.form(BatchLimits(10, 10), 3.0) is None


def test_fcfs_knows_no_alignment() -> None:
    former = FcfsBatchFormer()
    former.insert(pooled("a", 40, 0.0), 0.0)
    assert former.join(LengthRange(1, 100), PLENTY, 1.0) is None
