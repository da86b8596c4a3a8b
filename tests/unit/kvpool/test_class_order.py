"""Batches where classes are known: the first class that waits, then others of its lengths alone."""

import pytest

from alignedserve.core.class_floor import TurnClass
from alignedserve.core.ids import RequestId
from alignedserve.messages.cluster_view import LengthLeaf
from kvpool.policies import make_batch_former
from kvpool.policies.batch_former import AlignedBatch, BatchFormer, BatchLimits, LengthRange
from kvpool.state import PooledRequest

PLENTY = BatchLimits(max_blocks=10_000, max_requests=100)
TTFT_S = 3.0
FOR_REAL_TIME = BatchLimits(max_blocks=10_000, max_requests=100, is_for_real_time=True)


def pooled(name: str, context_len: int, arrival_s: float = 0.0) -> PooledRequest:
    turn_class = {"c": TurnClass.ON_TIME, "l": TurnClass.LATE, "d": TurnClass.BEST_EFFORT}[name[0]]
    return PooledRequest(
        RequestId(name), context_len, -(-context_len // 16), arrival_s, None, turn_class, ttft_s=TTFT_S
    )


def former_with(*waiting: tuple[str, int], floor: float = 0.0, name: str = "density_first") -> BatchFormer:
    """Build a former in which these wait: chats c, late ones l, documents d, with their lengths."""
    former = make_batch_former(name, block_size=16, starvation_s=2.0, best_effort_floor=floor)
    for number, (request, context_len) in enumerate(waiting):
        former.insert(pooled(request, context_len, float(number)), 0.0)
    return former


def names(batch: AlignedBatch | None) -> str:
    return " ".join(batch.request_ids) if batch is not None else ""


def take(former: BatchFormer, limits: BatchLimits, now: float = 0.0) -> str:
    """Form a batch, and remove what it grants, as the pool does."""
    batch = former.form(limits, now)
    for request_id in batch.request_ids if batch is not None else ():
        former.remove(request_id)
    return names(batch)


CROWD = [(f"d{number}", 900 + number) for number in range(40)]


@pytest.mark.parametrize("name", ["density_first", "fcfs"])
def test_chat_goes_before_documents_whatever_their_number_and_age(name: str) -> None:
    former = former_with(*CROWD, ("c1", 40), name=name)
    assert take(former, PLENTY) == "c1"
    assert take(former, PLENTY).startswith("d0 d1 ")


def test_late_chat_goes_after_chat_that_is_in_time() -> None:
    former = former_with(("l1", 900), ("c1", 40), ("d1", 40))
    assert [take(former, PLENTY) for _ in range(3)] == ["c1", "l1", "d1"]


def test_documents_join_the_lengths_of_the_last_chats_and_no_others() -> None:
    former = former_with(("c1", 40), ("c2", 44), ("d1", 43), ("d2", 42), ("d3", 45), ("d4", 900))
    assert take(former, BatchLimits(100, 5)) == "c1 d2 d1 c2"


def test_no_document_joins_while_a_chat_of_other_lengths_waits() -> None:
    assert take(former_with(("c1", 40), ("c2", 44), ("c3", 900), ("d1", 42)), BatchLimits(10, 5)) == "c1 c2"


def test_a_batch_that_goes_before_documents_has_none() -> None:
    former = former_with(("c1", 40), ("d1", 40))
    assert take(former, FOR_REAL_TIME) == "c1"
    assert take(former, FOR_REAL_TIME) == ""
    assert take(former, PLENTY) == "d1"


def test_a_document_goes_when_its_floor_has_made_up_its_tokens() -> None:
    """At a floor of a half each token of chat owes one: the document of 80 goes after two chats of 40."""
    former = former_with(("d1", 80), ("d2", 80), *[(f"c{number}", 40) for number in range(6)], floor=0.5)
    one_each = BatchLimits(1000, 1)
    assert [take(former, one_each) for _ in range(6)] == ["c0", "c1", "d1", "c2", "c3", "d2"]


def test_late_chat_that_waits_twice_as_long_as_others_goes_by_a_floor_of_its_own() -> None:
    """At a twentieth each token of those on time owes a nineteenth: it goes after nineteen like it."""
    former = former_with(("l1", 40), *[(f"c{number:02}", 40) for number in range(30)])
    one_each = BatchLimits(1000, 1)
    assert [take(former, one_each, now=TTFT_S) for _ in range(20)][-1] == "c19"
    assert take(former, one_each, now=2.0 * TTFT_S) == "l1"


def test_those_of_running_lengths_join_by_class() -> None:
    former = former_with(("d1", 40), ("c1", 42), ("c2", 900))
    lengths = LengthRange(32, 48)
    assert names(former.join(lengths, PLENTY, 0.0)) == "c1"
    former.remove(RequestId("c1"))
    assert names(former.join(lengths, PLENTY, 0.0)) == ""  # c2 still waits
    former.remove(RequestId("c2"))
    assert names(former.join(lengths, PLENTY, 0.0)) == "d1"
    assert former.join(lengths, FOR_REAL_TIME, 0.0) is None


def test_a_document_joins_by_its_floor() -> None:
    former = former_with(("d1", 40), ("d2", 40), ("c1", 60), ("c2", 900), floor=0.5)
    assert take(former, BatchLimits(1000, 1)) == "c1"
    assert names(former.join(LengthRange(32, 48), PLENTY, 0.0)) == "d1"


def test_all_classes_are_seen_as_one_tree() -> None:
    seen = former_with(("d1", 40), ("c1", 42), ("c2", 900)).seen()
    assert seen.leaf_len == 16
    assert seen.leaves == (LengthLeaf(2, 2, 6), LengthLeaf(56, 1, 57))
