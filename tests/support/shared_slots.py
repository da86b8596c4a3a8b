"""Blocks of a worker as single slots, by brute force: who has which, and whether a plan lets two have the same.

Knows nothing of pairs but who they are: every slot of every block is looked at.
"""

from collections.abc import Iterable

from alignedserve.scheduling.policy import EvictionMode, IterationPlan, WorkerView


class SlotModel:
    """The slots of all rows of a view: by block, the row that has each slot."""

    def __init__(self, view: WorkerView) -> None:
        table, self._size = view.table, view.memory.block_size
        self._is_real_time = table.is_real_time
        self.num_tokens = [int(table.num_cached[row] - table.num_swapped[row]) for row in range(len(table))]
        self.num_cached = [int(table.num_cached[row]) for row in range(len(table))]
        self.owners: dict[int, set[int]] = {}  # of blocks in use: the rows in whose block tables they are
        self.blocks: list[list[int]] = [[] for _ in range(len(table))]
        self._num_made = 0
        partners = view.shared_blocks.partner_rows() if view.shared_blocks is not None else {}
        for row in range(len(table)):
            wanted = -(-self.num_tokens[row] // self._size)
            assert wanted == table.num_blocks[row], "other blocks than its tokens fill"
            for _ in range(wanted):
                self._add(row, self._new_block())
        for row, other in partners.items():
            if row < other:
                assert table.is_real_time[row] != table.is_real_time[other]
                del self.owners[self.blocks[other].pop()]
                self._add(other, self.blocks[row][-1])
        self.num_free = view.memory.num_blocks - len(self.owners)
        assert self.num_free == view.memory.num_free, "blocks that are miscounted"
        self.check()

    def apply(self, plan: IterationPlan) -> None:
        """Perform a plan, and check that it leaves every slot to one row, with no more blocks than there are."""
        for part in plan.evictions:
            on_device = self.num_tokens[part.row]
            leaving = on_device if part.num_tokens is None else part.num_tokens
            assert 0 < leaving <= on_device
            self._keep(part.row, on_device - leaving)
            if part.how is EvictionMode.DROP:
                self.num_cached[part.row] = 0
        joined = {part.row: self.blocks[part.partner][-1] for part in plan.shares}
        for row, block in joined.items():
            assert len(self.owners[block]) == 1, "a block shared by three"
            self.owners[block].add(row)
        after = dict(enumerate(self.num_tokens))
        for one in plan.scheduled:
            after[one.row] = self.num_cached[one.row] + one.num_tokens
        for row in plan.uploads:
            after[row] = self.num_cached[row]
        for row in sorted(after, key=lambda row: not self._is_real_time[row]):  # best-effort ones make room
            if after[row] != self.num_tokens[row]:
                self._grow(row, after[row], joined.get(row))
        self.check()
        assert self.num_free >= 0, "more blocks than are free"

    def check(self) -> None:
        """Check that no slot has two rows."""
        taken: set[tuple[int, int]] = set()
        for row, num_tokens in enumerate(self.num_tokens):
            assert len(self.blocks[row]) == -(-num_tokens // self._size)
            for slot in self._slots(row, num_tokens):
                assert slot not in taken, "a slot of two rows"
                taken.add(slot)

    def _slots(self, row: int, num_tokens: int) -> Iterable[tuple[int, int]]:
        for token in range(num_tokens):
            column, offset = divmod(token, self._size)
            yield self.blocks[row][column], offset if self._is_real_time[row] else self._size - 1 - offset

    def _grow(self, row: int, num_tokens: int, joined: int | None) -> None:
        others = {
            slot for block in self.blocks[row][-1:] for other in self.owners[block] - {row}
            for slot in self._slots(other, self.num_tokens[other])
        }  # fmt: skip
        if not self._is_real_time[row] and others:
            own = list(self.blocks[row])
            self.blocks[row] = own + [-1] * (-(-num_tokens // self._size) - len(own))
            meets = len(self.blocks[row]) > len(own) or others & set(self._slots(row, num_tokens))
            self.blocks[row] = own
            if meets:  # it leaves the block
                self.owners[self.blocks[row].pop()].discard(row)
        for _ in range(-(-num_tokens // self._size) - len(self.blocks[row]) - (joined is not None)):
            self.num_free -= 1
            self._add(row, self._new_block())
        if joined is not None:
            self.blocks[row].append(joined)
        self.num_tokens[row] = self.num_cached[row] = num_tokens

    def _keep(self, row: int, num_tokens: int) -> None:
        self.num_tokens[row] = num_tokens
        while len(self.blocks[row]) > -(-num_tokens // self._size):
            block = self.blocks[row].pop()
            self.owners[block].discard(row)
            if not self.owners[block]:
                del self.owners[block]
                self.num_free += 1

    def _new_block(self) -> int:
        self._num_made += 1
        return self._num_made

    def _add(self, row: int, block: int) -> None:
        self.blocks[row].append(block)
        self.owners.setdefault(block, set()).add(row)
