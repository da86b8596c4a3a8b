"""Chunked packing against a plain form of its rules, over random workers, orders and levels."""

import random
from typing import Any

import numpy as np
import pytest

from alignedserve.scheduling.policy import IterationPlan, WorkerView
from lab.policies.chunked_packing import ChunkedPacking, ChunkOrder, order_of
from tests.harnesses.scheduling import assert_sound, view_of
from tests.support.marks import slow

_BLOCK = 4
_WATERMARK = 0.1


class Plain:
    """The rules of the packing, request by request, with nothing remembered but who has left and who computes."""

    def __init__(self, view: WorkerView, order: ChunkOrder, budget: int) -> None:
        self.view, self.order, self.budget = view, order, min(budget, view.limits.max_tokens)
        self.scheduled: dict[int, int] = {}
        self.evicted: list[int] = []
        self.closed = 99

    def holds(self, row: int) -> int:
        """Return the blocks of a request, with those kept for the rest of its prompt or given by this plan."""
        table = self.view.table
        cached, held = int(table.num_cached[row]), int(table.num_blocks[row])
        if row in self.evicted:
            return 0
        if row in self.scheduled and held == 0:
            return -(-int(table.context_len[row]) // _BLOCK)
        if held and table.num_remaining[row] > 1:
            return max(-(-int(table.context_len[row]) // _BLOCK), held)
        return max(-(-(cached + self.scheduled.get(row, 0)) // _BLOCK), held)

    def free(self) -> int:
        return self.view.memory.num_blocks - sum(self.holds(row) for row in range(len(self.view.table)))

    def num_places_left(self) -> int:
        return self.view.limits.max_running_requests - len(self.scheduled)

    def has_place(self, level: int) -> bool:
        worse = [row for row in self.scheduled if self.order.level[row] > level]
        if self.num_places_left() < 1 and worse:
            del self.scheduled[worse[-1]]
        return self.num_places_left() > 0

    def tokens_left(self) -> int:
        return self.budget - sum(self.scheduled.values())

    def evict(self, row: int) -> None:
        self.scheduled.pop(row, None)
        self.evicted.append(row)

    def plan(self) -> tuple[dict[int, int], set[int]]:
        table = self.view.table
        for row in self.order.turns.tolist():
            level = int(self.order.level[row])
            if row in self.evicted or self.tokens_left() < 1:
                continue
            if table.num_blocks[row] and table.num_remaining[row] == 1:
                if self.num_places_left() > 0:
                    self.decode(row)
            elif table.num_blocks[row]:
                if self.has_place(level):
                    self.scheduled[row] = min(int(table.num_remaining[row]), self.tokens_left())
            elif level < self.closed and not self.enter(row):
                self.closed = level
        return self.scheduled, set(self.evicted)

    def decode(self, row: int) -> None:
        keeps = self.order.keeps.tolist()
        while True:
            self.scheduled[row] = 1
            if self.free() >= 0:
                return
            del self.scheduled[row]
            after = [other for other in keeps[keeps.index(row) + 1 :] if other not in self.evicted]
            if not after or not self.view.can_evict:
                return
            self.evict(after[-1])

    def enter(self, row: int) -> bool:
        table = self.view.table
        needed = -(-int(table.context_len[row]) // _BLOCK)
        holders = [other for other in self.order.keeps.tolist() if other not in self.evicted]
        level = self.order.level
        worse = [other for other in holders if level[other] > level[row] and self.view.can_evict]
        is_alone = len(worse) == len(holders) and not self.scheduled
        needed += 0 if is_alone else int(_WATERMARK * self.view.memory.num_blocks)
        # The block that a decode takes by this plan is not counted among those that it would free.
        freed = sum(int(table.num_blocks[one]) if table.num_remaining[one] == 1 else self.holds(one) for one in worse)
        if self.free() + freed < needed:
            return False
        while self.free() < needed:
            self.evict(worse.pop())
            self.closed = min(self.closed, int(level[row]) + 1)
        if not self.has_place(int(level[row])):
            return False
        self.scheduled[row] = min(int(table.num_remaining[row]), self.tokens_left())
        return True


def random_worker(rng: random.Random) -> WorkerView:
    """Return up to nine requests: decodes, prompts in parts, new ones, on a worker that they nearly fill."""
    rows: dict[str, dict[str, Any]] = {}
    for number in range(rng.randrange(1, 10)):
        prompt_len = rng.randrange(1, 24)
        fields: dict[str, Any] = {"prompt_len": prompt_len, "arrival_s": rng.random(), "be": rng.random() < 0.5}
        kind = rng.random()
        if kind < 0.45:
            fields["num_generated"] = rng.randrange(1, 9)
        elif kind < 0.65 and prompt_len > 2:
            fields["num_cached"] = rng.randrange(1, prompt_len - 1)
        rows[f"r{number}"] = fields
    probe = view_of(rows, block_size=_BLOCK).table
    is_begun = (probe.num_blocks > 0) & (probe.num_remaining > 1)
    wanted = int(np.where(is_begun, -(-probe.context_len // _BLOCK), probe.num_blocks).sum())
    return view_of(
        rows,
        now=1.0,
        block_size=_BLOCK,
        num_blocks=max(wanted, 1) + rng.choice((0, 0, 1, 2, 5, 30)),
        max_running_requests=rng.choice((2, 4, 20)),
        can_evict=rng.random() < 0.8,
    )


def random_order(rng: random.Random, view: WorkerView) -> ChunkOrder:
    """Return an order by random keys, in groups that are levels or not."""
    num_rows = len(view.table)
    level = np.array([rng.randrange(2) for _ in range(num_rows)], np.int64)
    key = np.array([rng.random() for _ in range(num_rows)])
    keep = np.array([rng.random() for _ in range(num_rows)])
    group = rng.choice((level, np.zeros(num_rows, np.int64), 1 - level))
    return order_of(view, key, group=group, level=level, keep=rng.choice((None, keep)))


def packed(view: WorkerView, order: ChunkOrder, budget: int) -> IterationPlan:
    return ChunkedPacking(view, order, token_budget=budget, watermark=_WATERMARK).plan()


@pytest.mark.parametrize("seed", [*range(4), *slow(*range(4, 20))])
def test_it_packs_what_its_rules_say(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        view = random_worker(rng)
        order, budget = random_order(rng, view), rng.choice((3, 10, 60))
        plan = packed(view, order, budget)
        assert_sound(view, plan, is_finished=False)
        scheduled, evicted = Plain(view, order, budget).plan()
        assert {part.row: part.num_tokens for part in plan.scheduled} == scheduled
        assert {part.row for part in plan.evictions} == evicted


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 6))])
def test_worse_levels_change_nothing_for_better_ones(seed: int) -> None:
    """Whatever there is of the worse level, those of the better one compute what they would compute without it."""
    rng = random.Random(seed)
    for _ in range(100):
        view = random_worker(rng)
        table = view.table
        level = np.where(table.is_real_time, 0, 1)
        order = order_of(view, table.arrival_s, group=level, level=level)
        plan = packed(view, order, 40)
        real_time = {table.request_ids[part.row]: part.num_tokens for part in plan.scheduled if not level[part.row]}
        num_blocks = view.memory.num_blocks
        alone = view_of(
            {
                str(request_id): {
                    "prompt_len": int(table.prompt_len[row]),
                    "arrival_s": float(table.arrival_s[row]),
                    "num_generated": int(table.num_generated[row]),
                    "num_cached": int(table.num_cached[row]),
                    "num_blocks": int(table.num_blocks[row]),
                }
                for row, request_id in enumerate(table.request_ids)
                if table.is_real_time[row]
            },
            now=1.0,
            block_size=_BLOCK,
            num_blocks=num_blocks,
            max_running_requests=view.limits.max_running_requests,
        )
        if not view.can_evict or not len(alone.table):
            continue
        own = np.zeros(len(alone.table), np.int64)
        without = packed(alone, order_of(alone, alone.table.arrival_s, group=own, level=own), 40)
        assert real_time == {alone.table.request_ids[part.row]: part.num_tokens for part in without.scheduled}
