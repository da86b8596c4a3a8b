"""Numbers of tokens at which products fill a GPU: found on staircases, nowhere else."""

import math
import random

from alignedserve.costmodel.full_sizes import TRIED_SIZES, FullSizes
from alignedserve.costmodel.linear import Sample
from alignedserve.costmodel.work import IterationWork


def prompts(seconds_of: "dict[int, float]") -> list[Sample]:
    samples = []
    for size, seconds in seconds_of.items():
        work = IterationWork()
        work.add_chunk(size, 0, is_last=True)
        samples.append(Sample(work, seconds))
    return samples


def stair_s(size: int, step: int = 256) -> float:
    """Return the time of an iteration whose tiles have so many rows."""
    return 0.004 + 0.006 * math.ceil(size / step)


STAIRS = FullSizes.of(prompts({size: stair_s(size) for size in TRIED_SIZES}))


def test_an_iteration_ends_at_the_edge_of_a_stair() -> None:
    assert STAIRS is not None
    assert [STAIRS.best(most) for most in (600, 1023, 1024, 1065, 1279, 1290, 1500)] == [
        512, 1023, 1024, 1024, 1279, 1280, 1500
    ]  # fmt: skip


def test_what_is_chosen_computes_no_fewer_tokens_in_the_same_time() -> None:
    """Over any budget of an hour: whole iterations of that size, against those of all that one allows."""
    assert STAIRS is not None
    rng = random.Random(1)
    for _ in range(500):
        most = rng.randrange(520, 2048)
        chosen = STAIRS.best(most)
        assert 0.75 * most <= chosen <= most
        assert chosen / stair_s(chosen) >= most / stair_s(most)


def test_where_time_follows_the_tokens_no_more_is_left_out_than_lies_between_two_measurements() -> None:
    rng = random.Random(2)
    smooth = FullSizes.of(prompts({size: size * 2e-5 * rng.uniform(1.0, 1.005) for size in TRIED_SIZES}))
    assert smooth is not None
    assert all(most - smooth.best(most) < TRIED_SIZES.step for most in range(513, 2048, 7))


def test_beyond_what_was_measured_nothing_is_left_out() -> None:
    assert STAIRS is not None
    assert [STAIRS.best(most) for most in (3, 511, 2048, 8192)] == [3, 511, 2048, 8192]


def test_a_calibration_of_a_cpu_says_nothing_of_it() -> None:
    assert FullSizes.of(prompts({size: 1e-4 * size for size in (16, 64, 256, 512, 1024, 2048)})) is None
