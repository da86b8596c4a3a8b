"""AccelGen's choice against all others on small instances, and the longest wait over long histories."""

import itertools
import random

import pytest

from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policy import DeviceMemory, WorkerView
from tests.harnesses.policy_run import PolicyRun, random_arrivals
from tests.harnesses.scheduling import assert_sound, view_of

pytestmark = pytest.mark.slow

COMPUTE, BLOCKS, SIZE = 256, 14, 16


def queue_of(seed: int) -> WorkerView:
    """Draw up to nine prompts, most often more than fit."""
    rng = random.Random(seed)
    rows = {}
    for number in range(rng.randint(3, 9)):
        rows[f"request-{number}"] = {"prompt_len": rng.randint(5, 150), "ttft_s": 100.0}
    return view_of(rows, num_blocks=BLOCKS, block_size=SIZE, max_tokens=COMPUTE)


def left_over(view: WorkerView, rows: tuple[int, ...]) -> float | None:
    """Return the distance that the paper minimises, after all of these; None where they do not fit."""
    compute = COMPUTE - sum(int(view.table.prompt_len[row]) for row in rows)
    memory = BLOCKS - sum(view.memory.blocks_for(int(view.table.prompt_len[row])) for row in rows)
    if compute < 0 or memory < 0:
        return None
    return float((compute**2 + (memory * SIZE) ** 2) ** 0.5)


def test_selection_against_every_other_one() -> None:
    used, best_used = [], []
    everything = left_over(queue_of(0), ())
    assert everything is not None
    for seed in range(60):
        view = queue_of(seed)
        plan = make_policy("accelgen", {"watermark": 0.0}).plan(view)
        assert_sound(view, plan)
        reached = left_over(view, tuple(share.row for share in plan.scheduled))
        rows = range(len(view.table))
        subsets = itertools.chain.from_iterable(itertools.combinations(rows, num) for num in range(len(rows) + 1))
        best = min(distance for subset in subsets if (distance := left_over(view, subset)) is not None)
        assert reached is not None
        assert reached >= best
        used.append(1 - reached / everything)
        best_used.append(1 - best / everything)
    print(f"of the best: {sum(used) / sum(best_used):.3f}, least {min(map(float.__truediv__, used, best_used)):.3f}")
    assert all(one >= 0.5 * most for one, most in zip(used, best_used, strict=True))
    assert sum(used) >= 0.95 * sum(best_used)


@pytest.mark.parametrize(
    "settings",
    [
        {"dynamic_chunking": False},
        {"dynamic_chunking": False, "static_chunk_len": 100_000},
        {"prioritisation": False},
        {"multi_resource": False},
        {"long_prompt_len": 100},
        {"pivot_len": 64},
    ],
    ids=str,
)
def test_every_ablation_serves_everyone(settings: dict[str, float]) -> None:
    for seed, num_blocks in ((0, 28), (1, 60)):
        arrivals = random_arrivals(seed)
        run = PolicyRun(make_policy("accelgen", settings), DeviceMemory(num_blocks, num_blocks, SIZE))
        courses = run.run(arrivals, max_iterations=5000)
        assert sum(len(course.token_times_s) for course in courses.values()) == sum(one.output_len for one in arrivals)
