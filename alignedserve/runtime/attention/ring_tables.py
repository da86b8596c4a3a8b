"""Where the layers with a window find their keys and values, if these are in rings: see BlockLayout.with_rings.

A ring has blocks for the window of a context; the i-th block of its tokens is in the ring's block i modulo their
number, and so takes the place of one that no later token reads. A table of blocks says so of every ring, so that
attention reads contexts as it always does: what it finds in columns behind the window is of later tokens, and not read.

A chunk may be longer than a ring. Its tokens read the window before it and each other, so that it can take the place of
nothing until they have: the chunk's own blocks are scratch blocks meanwhile, the same for every layer. Once a layer has
attended, what the next tokens read is copied into the ring (RingRows.settle).

Example: blocks of 16 tokens, a window of 32, so rings of 4 blocks. A context of 40 tokens goes on by 100. Tokens 40 to
47 go to block 2 of the ring; those from 48 on to six scratch blocks, in the places of blocks 3 to 8. Behind the chunk
the last four of these, 5 to 8, are copied into blocks 1, 2, 3 and 0 of the ring."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.picture import settled_len
from alignedserve.runtime.attention.backend import Contexts
from alignedserve.runtime.attention.sequence_table import IntArray, SequenceTable, StateEdge
from alignedserve.runtime.device.arrays import Array, to_device
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.state_headers import UNFINISHED, tokens_behind_states

Slices = Sequence[tuple[RequestId, int]]  # of a step: tokens of each

_NONE = np.empty(0, np.int64)


class KeptRings(NamedTuple):
    """The copies of rings that a step leaves for others, on the host."""

    copies: IntArray  # [2, rings, blocks]: sources and targets
    blocks: IntArray  # [edges, blocks of a context's states]
    num_tokens: IntArray  # [edges]
    missed: IntArray  # headers of copies that were asked for, behind edges that the step does not reach

    @property
    def headers(self) -> IntArray:
        return self.blocks[:, 0]

    @property
    def written_blocks(self) -> IntArray:
        return np.concatenate((self.blocks.reshape(-1), self.missed))

    def leave(self, storage: BlockStorage) -> None:
        """Copy, behind a pass: what it wrote since the edges is in blocks to spare."""
        if not len(self.blocks):
            return
        arrays = (self.copies, np.ascontiguousarray(self.headers), self.num_tokens)
        copies, headers, num_tokens = to_device(arrays, storage.device)
        storage.copy_whole(*copies.flatten(1))
        tokens_behind_states(storage).index_copy_(0, headers, num_tokens)

    def mark_missed(self, storage: BlockStorage) -> None:
        """Mark copies that are not made as unfinished: their blocks may have the rings of another context."""
        if not len(self.missed):
            return
        (missed,) = to_device([self.missed], storage.device)
        tokens_behind_states(storage).index_fill_(0, missed, UNFINISHED)


class RingRows(NamedTuple):
    """The rings of a step's sequences, on the device."""

    slots: Sequence[Tensor]  # of each ring: as ForwardBatch.slots
    headers: Tensor  # blocks that say how far these rings are, and those of copies that the pass makes
    num_tokens: Tensor  # of each header, behind the step
    copies: Sequence[Tensor] = ()  # [2, rings, blocks] that the pass makes: those that are kept, then out of scratch

    def begin(self, storage: BlockStorage) -> None:
        tokens_behind_states(storage).index_fill_(0, self.headers, UNFINISHED)

    def settle(self, ring: int, index: int, storage: BlockStorage) -> None:
        """Bring one layer's keys and values, which the step's tokens have read, to where later ones find them."""
        parts = storage.layout.num_parts
        layer = storage.kinds[0].slots[:, index * parts : (index + 1) * parts]
        for copies in self.copies:  # what is kept may be what the others overwrite
            sources, targets = copies[:, ring]
            layer.index_copy_(0, targets, layer.index_select(0, sources))

    @property
    def has_chunks(self) -> bool:
        """Return whether scratch blocks are to be copied from before the next layer writes there."""
        return bool(self.copies)

    def end(self, storage: BlockStorage) -> None:
        tokens_behind_states(storage).index_copy_(0, self.headers, self.num_tokens)


class RingPlan(NamedTuple):
    """The same on the host."""

    slots: IntArray  # [rings, token rows]
    headers: IntArray
    num_tokens: IntArray
    kept: KeptRings
    own: IntArray  # as the copies of what is kept, of chunks in scratch blocks
    fresh_blocks: IntArray  # of the rings, in which no token of their context is yet

    @property
    def has_chunks(self) -> bool:
        """Return whether the pass copies, layer by layer: as chunks may pass an edge in their middle, both kinds."""
        return bool(self.own.shape[2])

    @property
    def host_arrays(self) -> tuple[Array, ...]:
        if not self.has_chunks:
            return self.slots, self.headers, self.num_tokens
        headers = np.concatenate((self.headers, self.kept.headers))
        num_tokens = np.concatenate((self.num_tokens, self.kept.num_tokens))
        copies = (self.kept.copies, self.own) if self.kept.copies.shape[2] else (self.own,)
        return self.slots, headers, num_tokens, *copies

    def bound(self, tensors: Sequence[Tensor]) -> RingRows:
        """Return what the forward pass needs; `tensors`: the host arrays on the device, perhaps flat."""
        slots, headers, num_tokens, *copies = tensors
        return RingRows(tuple(slots.view(len(self.slots), -1)), headers, num_tokens, copies)

    def padded(self, count: int, scratch_block: int, slot_stride: int) -> "RingPlan":
        slots = np.pad(self.slots, ((0, 0), (0, count)), constant_values=scratch_block * slot_stride)
        headers = np.pad(self.headers, (0, count), constant_values=scratch_block)
        return self._replace(slots=slots, headers=headers, num_tokens=np.pad(self.num_tokens, (0, count)))

    def leave_kept(self, storage: BlockStorage) -> None:
        if not self.has_chunks:
            self.kept.leave(storage)
        self.kept.mark_missed(storage)

    def written_by(self, num_rows: int, slot_stride: int) -> IntArray:
        return np.concatenate((self.slots[:, :num_rows].reshape(-1) // slot_stride, self.headers[:num_rows]))


class RingTables:
    """The tables of the rings of a sequence table's sequences."""

    def __init__(self, table: SequenceTable, layout: BlockLayout, scratch: Sequence[BlockId]) -> None:
        """`scratch`: blocks that nothing else uses, enough for the chunks of a step: see `num_scratch_blocks`."""
        self._table, self._layout = table, layout
        self._scratch = np.array(scratch, np.int64)
        max_sequences, num_columns = table.block_tables.shape
        self._in_ring = np.arange(num_columns) % layout.ring_blocks
        self.tables = np.zeros((layout.num_rings, max_sequences, num_columns), np.int64)
        self.changes = 0
        self._no_copies = np.empty((2, layout.num_rings, 0), np.int64)
        self._none_kept = KeptRings(self._no_copies, np.empty((0, layout.state_blocks), np.int64), _NONE, _NONE)
        self._entries = np.zeros(max_sequences, np.int64)  # of rows in these tables, as of the table's
        self._lent: dict[int, slice] = {}  # by row: columns in which it has scratch blocks

    def begin(self, rows: IntArray, counts: IntArray) -> RingPlan:
        """Plan rows of the table that compute `counts` tokens each, but for the slots of these tokens. The tables of
        other rows stay unchanged: a pass that was stopped may go on with them."""
        table, size = self._table, self._layout.block_size
        fresh = self._enter(rows[self._entries[rows] != table.entries[rows]])
        for row in rows.tolist() if self._lent else ():
            columns = self._lent.pop(row, None)
            if columns is not None:
                self.tables[:, row, columns] = self._own_blocks(row, columns)
                self.changes += 1
        before, after = table.num_computed[rows], table.num_computed[rows] + counts
        chunk_copies, chunks = self._no_copies, np.flatnonzero(counts > size + 1)
        if len(chunks):
            chunk_copies = self._lend(rows[chunks], before[chunks], after[chunks])
        kept_rings = self._kept(rows, before, after)
        if len(kept_rings.blocks):
            fresh = np.concatenate((fresh, kept_rings.blocks[:, 1:].reshape(-1)))
        return RingPlan(_NONE, table.state_tables[rows, 0], after, kept_rings, chunk_copies, fresh)

    def kept_by(self, rows: IntArray, *, is_computed: bool = False) -> KeptRings:
        """Return the copies to leave behind a step that was planned before they were asked for: one token of each of
        these rows, which `is_computed` by now or not."""
        before = self._table.num_computed[rows] - is_computed
        return self._kept(rows, before, before + 1)

    def with_room(self, slices: Slices, compute: Callable[[RequestId, int], None]) -> Slices:
        """Let `compute` compute what there is no scratch for in steps of its own; return what is left of the slices.
        Only slices that compute tokens again are so long. The last token of each is left."""
        while sum(self._num_lent(*piece) for piece in slices) > len(self._scratch):
            longest = max(slices, key=lambda piece: self._num_lent(*piece))
            request_id, count = longest
            row = self._table.row(request_id)
            before = int(self._table.num_computed[row])
            until = before + min((len(self._scratch) - 1) * self._layout.block_size, count - 1)
            num_tokens = settled_len(self._table.whole_runs.get(row, ()), until) - before
            assert num_tokens > 0, "a run of tokens that read one another, longer than all scratch"
            edges = self._table.kept_states.pop(row, [])
            self._keep_again(row, [edge for edge in edges if edge.num_tokens <= before + num_tokens])
            compute(request_id, num_tokens)
            self._keep_again(row, [edge for edge in edges if edge.num_tokens > before + num_tokens])
            slices = [(request_id, count - num_tokens) if piece is longest else piece for piece in slices]
        return slices

    def _keep_again(self, row: int, edges: list[StateEdge]) -> None:
        if edges:
            self._table.kept_states[row] = edges

    def _num_lent(self, request_id: RequestId, count: int) -> int:
        size = self._layout.block_size
        if count <= size + 1:  # as of all that decode
            return 0
        before = int(self._table.num_computed[self._table.row(request_id)])
        return -(-(before + count) // size) - -(-before // size)

    def slots(self, token_rows: IntArray, positions: IntArray, slot_stride: int) -> IntArray:
        """Return the slots of tokens of rows that a step has begun, in each ring [rings, tokens]."""
        columns, offsets = np.divmod(positions, self._layout.block_size)
        return np.ascontiguousarray(self.tables[:, token_rows, columns] * slot_stride + offsets)

    def _enter(self, rows: IntArray) -> IntArray:
        if not len(rows):
            return _NONE
        table = self._table
        rings = self._rings(rows)
        self.tables[:, rows] = rings[:, :, self._in_ring]
        self._entries[rows] = table.entries[rows]
        self.changes += 1
        for row in rows.tolist():
            self._lent.pop(row, None)
        return rings[:, table.num_computed[rows] == 0].reshape(-1)

    def _rings(self, rows: IntArray) -> IntArray:
        blocks = self._table.state_tables[rows, 1:].reshape(len(rows), self._layout.num_rings, -1)
        return blocks.swapaxes(0, 1)

    def _own_blocks(self, row: int, columns: slice | IntArray) -> IntArray:
        return self._rings(np.array([row]))[:, 0, self._in_ring[columns]]

    def _lend(self, rows: IntArray, before: IntArray, after: IntArray) -> IntArray:
        size, used, copies = self._layout.block_size, 0, [self._no_copies]
        for row, first_token, end in zip(rows.tolist(), before.tolist(), after.tolist(), strict=True):
            first, last = -(-first_token // size), -(-end // size)
            lent = self._scratch[used : used + last - first]
            assert len(lent) == last - first, "chunks of more tokens than there are scratch blocks for"
            used += len(lent)
            self.tables[:, row, first:last] = lent
            self._lent[row] = slice(first, last)
            stays = np.arange(max(first, last - self._layout.ring_blocks), last)
            copies.append(np.stack((self.tables[:, row, stays], self._own_blocks(row, stays))))
        self.changes += 1
        return np.concatenate(copies, axis=2)

    def _kept(self, rows: IntArray, before: IntArray, after: IntArray) -> KeptRings:
        if not self._table.kept_states:
            return self._none_kept
        edges, missed = self._edges(rows, before, after)
        if not edges:
            return self._none_kept._replace(missed=missed)
        copies = []
        for row, edge in edges:
            end = edge.num_tokens // self._layout.block_size
            columns = np.arange(max(end - self._layout.ring_blocks + 1, 0), end)
            targets = np.array(edge.block_ids[1:], np.int64).reshape(self._layout.num_rings, -1)
            copies.append(np.stack((self.tables[:, row, columns], targets[:, self._in_ring[columns]])))
        blocks, num_tokens = ([edge.block_ids for _, edge in edges], [edge.num_tokens for _, edge in edges])
        return KeptRings(np.concatenate(copies, axis=2), np.array(blocks), np.array(num_tokens), missed)

    def _edges(self, rows: IntArray, before: IntArray, after: IntArray) -> tuple[list[tuple[int, StateEdge]], IntArray]:
        """Return the edges that these rows pass and where they are to leave copies, each with its row; and the headers
        of copies behind those that they do not come to."""
        passed, missed = list[tuple[int, StateEdge]](), list[BlockId]()
        for row, first, last in zip(rows.tolist(), before.tolist(), after.tolist(), strict=True):
            for edge in self._table.kept_states.pop(row, ()):
                if first < edge.num_tokens <= last:
                    passed.append((row, edge))
                else:
                    missed.append(edge.block_ids[0])
        return passed, np.array(missed, np.int64)


class RingContexts:
    """Contexts as one ring has them: see Contexts."""

    def __init__(self, rings: RingTables, ring: int, contexts: Contexts) -> None:
        self._rings, self._contexts = rings, contexts
        self.block_tables: IntArray = rings.tables[ring]
        self.block_size, self.is_reversed = contexts.block_size, contexts.is_reversed

    @property
    def version(self) -> int:
        return self._contexts.version + self._rings.changes

    @property
    def num_computed(self) -> IntArray:
        return self._contexts.num_computed


def num_scratch_blocks(layout: BlockLayout, max_tokens: int, max_sequences: int) -> int:
    size = layout.block_size
    return -(-max_tokens // size) + min(max_sequences, max_tokens // size + 1) if layout.ring_layers else 0
