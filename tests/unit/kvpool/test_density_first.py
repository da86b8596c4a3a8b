"""Density-first search, one decision per test, on a tree of 16 leaves of 4 tokens (above 1-16, 17-32, 33-48, 49-64)."""

from alignedserve.core.ids import RequestId
from kvpool.policies.batch_former import AlignedBatch, BatchLimits, LengthRange
from kvpool.policies.density_first import DensityFirstBatchFormer, DensityFirstConfig
from kvpool.state import PooledRequest
from tests.support.marks import each

CONFIG = DensityFirstConfig(starvation_s=2.0, block_size=4, max_context_len=64)
SOON, LATE = 1.0, 3.0  # before and after everything inserted at 0 starves


def request(
    name: str, context_len: int, arrival_s: float = 0.0, *, num_blocks: int = 1, urgent_at_s: float | None = None
) -> PooledRequest:
    return PooledRequest(RequestId(name), context_len, num_blocks, arrival_s, urgent_at_s)


def former_with(*requests: PooledRequest, config: DensityFirstConfig = CONFIG) -> DensityFirstBatchFormer:
    former = DensityFirstBatchFormer(config)
    for one in requests:
        former.insert(one, 0.0)
    return former


def lengths(*context_lens: int) -> tuple[PooledRequest, ...]:
    """Return one request of one block per length, named after it and arriving in this order."""
    return tuple(request(str(length), length, float(number)) for number, length in enumerate(context_lens))


def names(batch: AlignedBatch | None) -> str:
    return " ".join(batch.request_ids) if batch is not None else "none"


# --- the three cases


def test_case_2_over_the_requests_as_well() -> None:
    assert names(former_with(*lengths(2, 10, 34, 39, 44, 60)).form(BatchLimits(100, 3), SOON)) == "34 39 44"


def test_case_2_counts_requests_and_not_blocks() -> None:
    long_one = request("60", 60, num_blocks=8)
    assert names(former_with(long_one, *lengths(2, 10)).form(BatchLimits(9, 100), SOON)) == "2 10"


def test_case_2_ties_go_to_the_left() -> None:
    assert names(former_with(*lengths(50, 60, 2, 10)).form(BatchLimits(2, 100), SOON)) == "2 10"


def test_case_3_takes_the_nearest_first_on_the_right() -> None:
    assert names(former_with(*lengths(33, 34, 38, 41, 45)).form(BatchLimits(4, 100, 3), SOON)) == "33 34 38"


def test_case_3_climbs_when_the_siblings_are_not_enough() -> None:
    """From the starving leaf 37-40: left and right under 33-48, then left of it 17-32, nearest first."""
    former = former_with(*lengths(20, 30, 34, 38, 46, 50))
    former.form(BatchLimits(100, 100), 1.0)
    former.remove(RequestId("38"))
    former.insert(request("38", 38), 0.0)
    assert names(former.form(BatchLimits(100, 3, 3), 2.5)) == "34 38 46"
    former.remove(RequestId("38"))
    former.insert(request("38", 38), 0.0)
    assert names(former.form(BatchLimits(100, 5, 5), 2.5)) == "20 30 34 38 46"


def test_widening_ends_with_the_leaf_that_does_not_fit_as_a_whole() -> None:
    """Two more blocks: of 33 and 34 the older fits and not the younger, and what lies beyond stays."""
    large, small = request("33", 33, 1.0, num_blocks=2), request("34", 34, 2.0, num_blocks=2)
    former = former_with(large, small, *lengths(38, 39, 40, 30))
    assert names(former.form(BatchLimits(5, 100, 5), SOON)) == "33 38 39 40"


# --- limits


def test_in_a_leaf_a_younger_one_fits_where_an_older_does_not() -> None:
    former = former_with(
        request("a", 30, 1.0, num_blocks=2), request("b", 30, 2.0, num_blocks=2), request("c", 30, 3.0, num_blocks=1)
    )
    assert names(former.form(BatchLimits(3, 100), SOON)) == "a c"


def test_hundreds_of_one_length_come_out_in_order() -> None:
    former = former_with(*(request(f"r{number:03d}", 30, float(number % 7)) for number in range(500)))
    order = sorted(range(500), key=lambda number: (number % 7, number))
    seen: list[str] = []
    while (batch := former.form(BatchLimits(48, 100, 36), SOON)) is not None:
        seen += batch.request_ids
        for request_id in batch.request_ids:
            former.remove(request_id)
    assert seen == [f"r{number:03d}" for number in order]


def test_lengths_over_the_maximum_are_counted_as_the_maximum() -> None:
    former = former_with(
        request("max", 65536, num_blocks=4096),
        request("over", 1_000_000, num_blocks=4096),
        request("short", 65520, num_blocks=4095),
        config=DensityFirstConfig(),
    )
    batch = former.form(BatchLimits(10_000, 100), SOON)
    assert batch == AlignedBatch((RequestId("max"), RequestId("over")), LengthRange(65536, 1_000_001), 8192)


# --- requests larger than the limit alone


def test_one_larger_than_the_limit_blocks_no_other_and_is_not_forgotten() -> None:
    former = former_with(request("giant", 30, 0.0, num_blocks=9), request("a", 30, 1.0), request("b", 29, 2.0))
    assert names(former.form(BatchLimits(8, 100, 2), LATE)) == "b a"
    assert names(former.form(BatchLimits(9, 100, 1), LATE + 3.0)) == "giant"


def test_a_crowd_larger_than_the_limit_is_no_density() -> None:
    former = former_with(*tuple(request(f"giant{number}", 50, num_blocks=9) for number in range(5)), *lengths(2, 10))
    assert names(former.form(BatchLimits(8, 100), SOON)) == "2 10"


def test_one_larger_than_the_limit_does_not_end_the_widening() -> None:
    former = former_with(request("giant", 38, num_blocks=9), *lengths(33, 34, 41))
    assert names(former.form(BatchLimits(8, 100, 3), SOON)) == "33 34 41"


# --- starving and endangered ones


def test_the_longest_starving_goes_first_and_then_the_left_most() -> None:
    former = DensityFirstBatchFormer(CONFIG)
    for one, now in zip(lengths(10, 20, 60, 30), (0.5, 0.25, 0.0, 0.25), strict=True):
        former.insert(one, now)
    order = [names(former.form(BatchLimits(1, 100), 10.0 + number)) for number in range(5)]
    assert order == ["60", "20", "30", "10", "60"]


def test_a_starving_range_that_gave_something_waits_anew() -> None:
    former = former_with(*(request(name, 60) for name in "ab"), *lengths(2, 3, 6))
    limits = BatchLimits(1, 100)
    assert names(former.form(limits, LATE)) == "2"
    assert names(former.form(limits, LATE)) == "6"
    assert names(former.form(limits, LATE)) == "a"
    assert names(former.form(limits, LATE)) == "2"  # nothing starves now; the densest leaf


def test_a_range_that_was_empty_begins_to_wait_when_it_is_occupied() -> None:
    former = former_with(*lengths(2, 3))
    former.remove(RequestId("2"))
    former.remove(RequestId("3"))
    former.insert(request("4", 4), 10.0)
    for one in lengths(50, 51):
        former.insert(one, 10.5)
    assert names(former.form(BatchLimits(2, 100), 11.0)) == "50 51"
    assert names(former.form(BatchLimits(1, 100), 12.0)) == "4"


def test_a_starving_range_widens_like_any_other() -> None:
    former = former_with(*lengths(60))
    for one in lengths(2, 3, 6, 7, 55, 63):
        former.insert(one, 1.5)
    assert names(former.form(BatchLimits(4, 100, 2), 2.0)) == "55 60 63"
    assert names(former.form(BatchLimits(4, 100, 2), 2.0)) == "2 3 6 7"


def test_in_a_starving_range_the_search_goes_where_most_requests_are() -> None:
    former = former_with(*lengths(49))
    former.insert(request("8", 8), 0.5)
    for one in lengths(57, 58, 59, 60, 2, 3, 6, 7, 10, 11, 14, 15):
        former.insert(one, 1.5)
    limits = BatchLimits(4, 100)
    assert names(former.form(limits, 2.0)) == "57 58 59 60"  # of 49-64, which gave nothing since 0.0
    assert names(former.form(limits, 2.0)) == "49"  # of 49-52: 49-64 has been served


def test_a_wide_range_that_was_empty_begins_to_wait_when_it_is_occupied() -> None:
    former = former_with(*lengths(2, 49))
    former.remove(RequestId("49"))
    former.insert(request("57", 57), 1.5)
    former.insert(request("58", 58), 1.5)
    assert names(former.form(BatchLimits(2, 100), 2.0)) == "2"
    assert names(former.form(BatchLimits(1, 100), 3.5)) == "57"


def test_an_endangered_request_is_in_the_batch_even_where_older_ones_wait() -> None:
    older = (request(f"old{number}", 60, float(number)) for number in range(3))
    former = former_with(*older, request("urgent", 59, 9.0, urgent_at_s=1.0), *lengths(2, 3, 6, 7, 10))
    limits = BatchLimits(3, 100, 2)
    assert names(former.form(limits, 0.9)) == "2 3"
    assert names(former.form(limits, 1.0)) == "urgent old0 old1"


def test_the_most_urgent_goes_first_and_before_the_starving() -> None:
    former = former_with(
        request("starving", 2), request("urgent", 30, urgent_at_s=2.5), request("more", 60, urgent_at_s=2.4)
    )
    order: list[str] = []
    for _ in range(3):
        batch = former.form(BatchLimits(1, 100), LATE)
        assert batch is not None
        order += batch.request_ids
        former.remove(batch.request_ids[0])
    assert order == ["more", "urgent", "starving"]


def test_equally_urgent_ones_go_by_arrival_and_id() -> None:
    former = former_with(
        request("b", 2, 1.0, urgent_at_s=0.5),
        request("a", 30, 1.0, urgent_at_s=0.5),
        request("c", 60, 0.5, urgent_at_s=0.5),
    )
    assert names(former.form(BatchLimits(1, 100), SOON)) == "c"
    former.remove(RequestId("c"))
    assert names(former.form(BatchLimits(1, 100), SOON)) == "a"


def test_an_endangered_request_larger_than_the_limit_is_passed_over() -> None:
    former = former_with(request("giant", 60, num_blocks=9, urgent_at_s=0.1), request("urgent", 30, urgent_at_s=0.5))
    assert names(former.form(BatchLimits(8, 1), SOON)) == "urgent"
    assert names(former.form(BatchLimits(9, 1), SOON)) == "giant"


# --- joining a running batch


def test_who_lies_in_the_range_joins_oldest_first() -> None:
    former = former_with(*lengths(30, 34, 31, 33, 35, 29, 32))
    batch = former.join(LengthRange(30, 35), BatchLimits(3, 100), SOON)
    assert batch == AlignedBatch((RequestId("30"), RequestId("31"), RequestId("34")), LengthRange(30, 35), 3)
    assert names(former.join(LengthRange(30, 35), BatchLimits(100, 2), SOON)) == "30 34"
    assert names(former.join(LengthRange(30, 35), BatchLimits(100, 100), SOON)) == "30 31 32 33 34"


@each("range_", [LengthRange(36, 60), LengthRange(30, 30), LengthRange(40, 1)])
def test_no_request_in_the_range_is_none(range_: LengthRange) -> None:
    assert former_with(*lengths(30, 35, 60)).join(range_, BatchLimits(100, 100), SOON) is None


def test_the_first_joining_one_that_does_not_fit_ends_it_but_a_giant_does_not() -> None:
    former = former_with(
        request("giant", 30, 0.0, num_blocks=9),
        request("a", 31, 1.0, num_blocks=3),
        request("b", 31, 2.0, num_blocks=3),
        request("c", 31, 3.0, num_blocks=1),
    )
    assert names(former.join(LengthRange(30, 32), BatchLimits(5, 100), SOON)) == "a"
    assert names(former.join(LengthRange(30, 32), BatchLimits(8, 100), SOON)) == "a b c"
    assert former.join(LengthRange(30, 32), BatchLimits(100, 0), SOON) is None


def test_a_range_that_gave_joining_requests_does_not_starve() -> None:
    former = former_with(*lengths(30), request("60", 60))
    assert names(former.join(LengthRange(29, 33), BatchLimits(100, 100), 1.0)) == "30"
    assert names(former.form(BatchLimits(1, 100), 2.5)) == "60"


# --- docs/policies/density_first.md


def test_the_example_of_the_page() -> None:
    former = former_with(*lengths(41, 2, 60, 20, 9, 43, 33, 38, 35, 42))
    batch = former.form(BatchLimits(5, 100, 4), SOON)
    assert batch == AlignedBatch(tuple(map(RequestId, ("38", "41", "42", "43"))), LengthRange(38, 44), 4)
    assert names(former.form(BatchLimits(5, 100, 5), SOON)) == "33 38 41 42 43"
    assert names(former.form(BatchLimits(2, 100, 4), SOON)) == "41 43"
    unserved = former_with(*lengths(41, 2, 60, 20, 9, 43, 33, 38, 35, 42))
    assert names(unserved.form(BatchLimits(5, 100, 4), 2.0)) == "2 9 20 33 35"
