"""Loans of the memory for candidate buffers, as borrowers come and go."""

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.runtime.kv.buffer_budget import BufferBudget

NEAR = ("decode-0", "decode-1")
NAMES = (*NEAR, *(f"decode-{number}" for number in range(2, 9)))


def test_the_example_of_the_docstring() -> None:
    budget = BufferBudget(90, NEAR, num_others=2)
    assert [budget.lend(name) for name in NAMES[:6]] == [30, 30, 10, 10, 5, 2]


def test_on_one_host_all_is_for_the_decode_workers_there() -> None:
    budget = BufferBudget(90, NEAR)
    assert [budget.lend(name) for name in NAMES[:3]] == [45, 45, 0]


def test_a_cluster_that_may_grow_keeps_a_share_for_those_that_come() -> None:
    budget = BufferBudget(90, NEAR, may_grow=True)
    assert [budget.lend(name) for name in NAMES[:4]] == [30, 30, 15, 7]


def test_without_decode_workers_here_all_is_for_others() -> None:
    budget = BufferBudget(90, (), num_others=2)
    assert [budget.lend(name) for name in NAMES[:2]] == [30, 30]


def test_one_that_comes_back_gets_as_much_again() -> None:
    budget = BufferBudget(90, NEAR, num_others=1)
    first = {name: budget.lend(name) for name in NAMES[:3]}
    for name in first:
        budget.give_back(name)
        budget.give_back(name)
    assert {name: budget.lend(name) for name in first} == first


@given(
    num_blocks=st.integers(0, 200),
    num_near=st.integers(0, 2),
    num_others=st.integers(0, 4),
    may_grow=st.booleans(),
    moves=st.lists(st.sampled_from(NAMES), max_size=40),
)
def test_never_more_is_lent_than_there_is(
    num_blocks: int, num_near: int, num_others: int, may_grow: bool, moves: list[str]
) -> None:
    budget = BufferBudget(num_blocks, NEAR[:num_near], num_others=num_others, may_grow=may_grow)
    lent: dict[str, int] = {}
    for name in moves:  # each comes when it is gone, and goes when it is there
        if name in lent:
            budget.give_back(name)
            del lent[name]
        else:
            lent[name] = budget.lend(name)
        assert min(lent.values(), default=0) >= 0
        assert budget.num_lent == sum(lent.values()) <= num_blocks
    near = [name for name in NEAR[:num_near] if name not in lent]
    assert len({budget.lend(name) for name in near} | {lent[name] for name in NEAR[:num_near] if name in lent}) <= 1
