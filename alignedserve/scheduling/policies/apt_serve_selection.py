"""Apt-Serve's selection (section 5): requests that get a cache, and its kind, by marginal gain per block.

A knapsack in which every candidate may be left out, taken with a hidden cache, or taken with keys and values. Each
candidate has one or two items: its first cache, and the step from a hidden cache to keys and values. Items are taken
in the order of gain per block. All of it is array operations; the number of rounds depends on how often an item is
passed over for a smaller one, not on how many candidates there are.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from alignedserve.scheduling.table import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class KnapsackItems:
    """Columns of equal length, in the order that breaks ties."""

    value: Floats  # of scheduling it with keys and values (seconds)
    num_blocks: Ints  # of keys and values; at least 1
    num_tokens: Ints  # to compute
    penalty: Floats  # of a hidden cache, to be subtracted from the value (seconds)
    hidden_blocks: Ints  # of a hidden cache; no fewer than `num_blocks` where there is none


class SelectionBudget(NamedTuple):
    """Resources left for candidates."""

    num_blocks: int
    num_tokens: int
    num_places: int
    hidden_tokens: int = 0  # that may be held in new hidden caches
    splits_last: bool = False  # the last one may compute a part of its tokens

    @property
    def is_left(self) -> bool:
        return min(self.num_blocks, self.num_tokens, self.num_places) > 0


class Selection(NamedTuple):
    """The scheduled candidates, densest first."""

    indices: Ints  # into the candidates
    is_hidden: Bools
    num_tokens: Ints
    value: float  # in all


@dataclass(frozen=True, slots=True)
class _Items:
    owner: Ints  # index into the candidates
    is_first: Bools  # the cache itself; else the step from hidden vectors to keys and values
    num_blocks: Ints
    num_tokens: Ints
    gain: Floats

    def ordered(self, order: Ints) -> "_Items":
        return _Items(
            self.owner[order], self.is_first[order], self.num_blocks[order], self.num_tokens[order], self.gain[order]
        )


def select(candidates: KnapsackItems, budget: SelectionBudget) -> Selection:
    """Select greedily, or around the best single candidate if that alone has a greater value.

    If only blocks are short, the value is at least half of the optimum (Apt-Serve, section 5): all items up to and
    including the first that does not fit have at least the optimal value, and that one alone at most the value of the
    best single candidate. Places, tokens and the limit on hidden tokens have no such bound.
    """
    if not len(candidates.value) or not budget.is_left:
        return Selection(np.zeros(0, np.int64), np.zeros(0, np.bool_), np.zeros(0, np.int64), 0.0)
    is_hidden = _offered(candidates, budget)
    items = _items(candidates, is_hidden, budget)
    items = items.ordered(np.argsort(-(items.gain / items.num_blocks), kind="stable"))
    taken = _take(items, budget)
    alone = _value_alone(candidates, is_hidden, budget)
    best = int(np.argmax(alone))
    if items.gain[taken].sum() < alone[best]:
        items = items.ordered(np.argsort(items.owner != best, kind="stable"))
        taken = _take(items, budget)
    has_step = np.zeros_like(is_hidden)
    has_step[items.owner[taken & ~items.is_first]] = True
    indices, num_tokens = items.owner[taken & items.is_first], items.num_tokens[taken & items.is_first]
    before = np.cumsum(num_tokens) - num_tokens
    return Selection(
        indices,
        (is_hidden & ~has_step)[indices],
        np.minimum(num_tokens, budget.num_tokens - before),
        float(items.gain[taken].sum()),
    )


def _offered(candidates: KnapsackItems, budget: SelectionBudget) -> Bools:
    """Return which candidates first get a hidden cache: if it gains more per block than keys and values at once.

    (Or if keys and values alone do not fit.) The limit on hidden tokens goes to the densest.
    """
    value = candidates.value - candidates.penalty
    density = value / np.maximum(candidates.hidden_blocks, 1)
    is_denser = density >= candidates.value / candidates.num_blocks
    is_offered: Bools = (
        (candidates.hidden_blocks < candidates.num_blocks)
        & (candidates.hidden_blocks <= budget.num_blocks)
        & (value >= 0)
        & (is_denser | (candidates.num_blocks > budget.num_blocks))
    )
    (wanting,) = np.nonzero(is_offered)
    wanting = wanting[np.argsort(-density[wanting], kind="stable")]
    is_offered[wanting[np.cumsum(candidates.num_tokens[wanting]) > budget.hidden_tokens]] = False
    return is_offered


def _items(candidates: KnapsackItems, is_hidden: Bools, budget: SelectionBudget) -> _Items:
    fits = candidates.num_blocks <= budget.num_blocks
    first, second = np.flatnonzero(fits | is_hidden), np.flatnonzero(fits & is_hidden)
    num_blocks = np.where(is_hidden, candidates.hidden_blocks, candidates.num_blocks)
    gain = np.where(is_hidden, candidates.value - candidates.penalty, candidates.value)
    return _Items(
        owner=np.concatenate((first, second)),
        is_first=np.arange(len(first) + len(second)) < len(first),
        num_blocks=np.concatenate((num_blocks[first], (candidates.num_blocks - num_blocks)[second])),
        num_tokens=np.concatenate((candidates.num_tokens[first], np.zeros_like(second))),
        gain=np.concatenate((gain[first], candidates.penalty[second])),
    )


def _value_alone(candidates: KnapsackItems, is_hidden: Bools, budget: SelectionBudget) -> Floats:
    value = np.where(is_hidden, candidates.value - candidates.penalty, -np.inf)
    value = np.where(candidates.num_blocks <= budget.num_blocks, candidates.value, value)
    return np.where((candidates.num_tokens <= budget.num_tokens) | budget.splits_last, value, -np.inf)


def _take(items: _Items, budget: SelectionBudget) -> Bools:
    taken = np.zeros(len(items.owner), np.bool_)
    is_passed = np.zeros(int(items.owner.max(initial=-1)) + 1, np.bool_)  # by owner
    left, waiting = budget, np.arange(len(items.owner))
    while len(waiting):
        num_taken = _num_fitting(items, waiting, left)
        now, waiting = waiting[:num_taken], waiting[num_taken:]
        taken[now] = True
        left = left._replace(
            num_blocks=left.num_blocks - int(items.num_blocks[now].sum()),
            num_tokens=max(left.num_tokens - int(items.num_tokens[now].sum()), 0),
            num_places=left.num_places - int(items.is_first[now].sum()),
        )
        fits = _fits_alone(items, waiting, left)
        is_passed[items.owner[waiting[~fits & items.is_first[waiting]]]] = True
        waiting = waiting[fits & ~is_passed[items.owner[waiting]]]
    return taken


def _num_fitting(items: _Items, waiting: Ints, left: SelectionBudget) -> int:
    num_tokens = items.num_tokens[waiting]
    tokens = np.cumsum(num_tokens)
    fits = tokens <= left.num_tokens
    if left.splits_last:
        fits |= tokens - num_tokens < left.num_tokens
    fits &= np.cumsum(items.num_blocks[waiting]) <= left.num_blocks
    fits &= np.cumsum(items.is_first[waiting]) <= left.num_places
    return len(fits) if fits.all() else int(np.argmin(fits))


def _fits_alone(items: _Items, waiting: Ints, left: SelectionBudget) -> Bools:
    num_tokens = items.num_tokens[waiting]
    most_tokens = np.where(left.splits_last, left.num_tokens > 0, num_tokens <= left.num_tokens) | (num_tokens == 0)
    has_place = ~items.is_first[waiting] | (left.num_places > 0)
    fits: Bools = most_tokens & has_place & (items.num_blocks[waiting] <= left.num_blocks)
    return fits
