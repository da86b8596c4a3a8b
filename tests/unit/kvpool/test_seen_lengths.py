"""What the pool tells of the lengths that wait in it, and of the batch that it formed last."""

from alignedserve.core.ids import BatchId, RequestId
from alignedserve.messages.cluster_view import MAX_RANGES, FormedBatch, LengthLeaf, LengthTree, tree_of
from kvpool.policies.density_first import DensityFirstBatchFormer, DensityFirstConfig
from kvpool.quad_tree import QuadTree
from kvpool.state import PooledRequest
from tests.harnesses.pool import FORM, PoolHarness
from tests.support.marks import each
from tests.support.samples import DECODE, ROUTER


def tree_with(*lengths: int, max_context_len: int = 4096) -> QuadTree:
    tree = QuadTree(block_size=16, max_context_len=max_context_len)
    for number, length in enumerate(lengths):
        tree.insert(PooledRequest(RequestId(f"r{number}"), length, -(-length // 16), 0.0, None), 0.0)
    return tree


def test_the_leaves_of_a_tree_with_few_are_told_one_by_one() -> None:
    leaves = (LengthLeaf(0, 2, 2), LengthLeaf(3, 1, 4), LengthLeaf(255, 1, 256))
    assert tree_with(5, 16, 64, 4096).seen() == LengthTree(4096, 16, leaves)
    assert tree_with().seen() == LengthTree(4096, 4096)


@each("step", [16, 33, 64])
def test_a_tree_with_many_is_told_as_coarsely_as_it_takes(step: int) -> None:
    lengths = range(1, 4096, step)
    seen = tree_with(*lengths).seen()
    by_leaf: dict[int, tuple[int, int]] = {}
    for length in lengths:
        num_requests, num_blocks = by_leaf.get((length - 1) // 16, (0, 0))
        by_leaf[(length - 1) // 16] = (num_requests + 1, num_blocks + -(-length // 16))
    assert seen == tree_of(by_leaf, leaf_len=16, max_len=4096)
    assert MAX_RANGES / 4 < len(seen.leaves) <= MAX_RANGES
    assert sum(one.num_requests for one in seen.leaves) == len(lengths)


def test_the_pool_tells_its_lengths_and_its_last_batch() -> None:
    former = DensityFirstBatchFormer(DensityFirstConfig(block_size=4, max_context_len=64))
    made = PoolHarness(former)
    made.pool("r1", 2)
    waiting = made.lengths
    assert waiting is not None
    assert [leaf.num_requests for leaf in waiting.leaves] == [1]
    assert waiting.formed is None
    made.hear(ROUTER, FORM)
    assert made.lengths is not None
    assert isinstance(made.lengths.formed, FormedBatch)
    assert (made.lengths.formed.batch_id, made.lengths.formed.worker) == (BatchId(1), DECODE)
