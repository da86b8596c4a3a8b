"""Block tables of decodes, mostly taken from the step before, are those of the table."""

import random

import numpy as np

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.attention.block_entries import DecodeEntries, all_entries
from alignedserve.runtime.attention.sequence_table import NewSequence, SequenceTable
from tests.support.marks import each


def new_sequence(number: int, length: int, blocks: list[BlockId]) -> NewSequence:
    return NewSequence(RequestId(str(number)), (1,) * length, length, length - 1, tuple(blocks), SamplingParams())


@each("block_size", [1, 3])
@each("seed", range(4))
def test_entries_are_those_of_the_table_whatever_happens_between_steps(seed: int, block_size: int) -> None:
    """Sequences decode, borrow blocks ahead of their own, compute chunks, come, leave, and have blocks replaced."""
    rng = random.Random(seed)
    table = SequenceTable(max_sequences=6, max_context_len=90, block_size=block_size)
    known, fresh, running = DecodeEntries(table), iter(map(BlockId, range(1, 100_000))), list[int]()
    for step in range(150):
        if len(running) < 2 or (len(running) < 6 and rng.random() < 0.1):
            length = rng.randrange(1, 40)
            table.add(new_sequence(step, length, [next(fresh) for _ in range(-(-(length - 1) // block_size))]))
            running.append(step)
        rows = table.rows([RequestId(str(number)) for number in running])
        for row, number in zip(rows.tolist(), running, strict=True):
            needed = int(table.num_computed[row]) // block_size + 1
            if needed > table.num_blocks[row]:  # lent to a step that is launched ahead, then its own
                if rng.random() < 0.5:
                    table.lend_blocks(np.array([row]), np.array([needed - 1]), np.array([next(fresh)]))
                else:
                    own = [next(fresh) for _ in range(needed - int(table.num_blocks[row]))]
                    table.append_blocks(RequestId(str(number)), own)
        widths = table.num_computed[rows] // block_size + 1
        for _ in range(2):  # a step that is planned and dropped, and the one in its place
            assert known.of(rows, widths).tolist() == all_entries(table.block_tables, rows, widths).tolist()
        for row, number in zip(rows.tolist(), running, strict=True):
            needed = int(table.num_computed[row]) // block_size + 1
            table.append_blocks(
                RequestId(str(number)), [next(fresh) for _ in range(needed - int(table.num_blocks[row]))]
            )
            table.num_computed[row] += 1
            if rng.random() < 0.02 and table.num_computed[row] >= block_size:
                table.replace_block(RequestId(str(number)), 0, next(fresh))
        for row, number in zip(rows.tolist(), list(running), strict=True):
            if table.num_computed[row] > 80 or rng.random() < 0.02:
                table.remove(RequestId(str(number)))
                running.remove(number)


def test_a_plan_keeps_its_own_entries() -> None:
    """The last block of one that was planned ahead is filled in when its step is asked for."""
    table = SequenceTable(max_sequences=1, max_context_len=9, block_size=4)
    rows, widths = np.array([table.add(new_sequence(0, 5, [BlockId(7), BlockId(8)]))]), np.array([2])
    known = DecodeEntries(table)
    first, second = known.of(rows, widths), known.of(rows, widths)
    first[1] = 99
    assert second.tolist() == [7, 8]
    second[1] = 99
    assert known.of(rows, widths).tolist() == [7, 8]
