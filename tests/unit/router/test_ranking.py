"""Names in the order of a rank that changes."""

from contextlib import closing
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from router.ranking import Ranking

CHANGES = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.one_of(st.none(), st.integers(0, 5))), max_size=300)


@given(CHANGES)
def test_the_first_is_the_least_of_all_by_rank_then_name(changes: list[tuple[str, int | None]]) -> None:
    ranking: Ranking[int] = Ranking()
    plain: dict[str, int] = {}
    for name, rank in changes:
        if rank is None:
            ranking.discard(name)
            plain.pop(name, None)
        else:
            ranking.put(name, rank)
            plain[name] = rank
        assert ranking.first() == min(((rank, name) for name, rank in plain.items()), default=None)
        assert len(ranking) == len(plain)


def test_ranks_that_change_for_ever_take_no_memory() -> None:
    ranking: Ranking[int] = Ranking()
    for number in range(10_000):
        ranking.put(f"worker-{number % 4}", number)
    assert len(ranking._heap) < 100


@given(CHANGES, st.integers(0, 9))
def test_names_come_in_order_and_keep_their_ranks(changes: list[tuple[str, int | None]], num_taken: int) -> None:
    ranking: Ranking[int] = Ranking()
    plain = {name: rank for name, rank in changes if rank is not None}
    for name, rank in plain.items():
        ranking.put(name, rank)
    in_order = [name for _, name in sorted((rank, name) for name, rank in plain.items())]
    with closing(ranking.in_order()) as names:
        assert list(islice(names, num_taken)) == in_order[:num_taken]
    assert list(ranking.in_order()) == in_order
