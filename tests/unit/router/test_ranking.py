"""Names in the order of a rank that changes."""

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
