"""The oracle's goodput against the best of all schedules, on instances small enough to try every one."""

import itertools
import random

import pytest

from alignedserve.core.request import Slo
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policy import DeviceMemory, IterationLimits
from tests.harnesses.policy_run import Arrival, PolicyRun
from tests.harnesses.scheduling import EasyCosts, request_of
from tests.support.marks import many

COSTS = EasyCosts(base_s=0.02, token_s=0.001, context_s=0.00001)
STEP = 20  # prompts are multiples of it, and so are the chunks that are tried
Progress = tuple[int, int, float, float]  # prompt tokens computed, tokens generated, first token, last token


def small_instance(seed: int, gap_s: float) -> list[Arrival]:
    """Draw three requests, together or some `gap_s` after others; some could not hold their SLOs even alone."""
    rng = random.Random(seed)
    arrivals, arrival_s = [], 0.0
    for number in range(3):
        fields = {
            "arrival_s": arrival_s,
            "prompt_len": STEP * rng.randint(1, 3),
            "max_tokens": 3,
            "ttft_s": rng.choice([0.06, 0.1, 0.15, 0.25]),
            "tpot_s": rng.choice([0.03, 0.06, 0.12]),
        }
        output_len = rng.randint(1, 3)
        arrivals.append(Arrival(request_of(f"request-{number}", fields), output_len, float(output_len)))
        arrival_s += rng.choice([0.0, 0.0, gap_s])
    return arrivals


def _holds(arrival_s: float, slo: Slo, first_s: float, last_s: float, output_len: int) -> bool:
    assert slo.ttft_s is not None
    assert slo.tpot_s is not None
    return first_s - arrival_s <= slo.ttft_s + 1e-9 and last_s - first_s <= slo.tpot_s * max(output_len - 1, 0) + 1e-9


def best_goodput(arrivals: list[Arrival]) -> int:
    """Count the requests that can hold their SLOs under the best schedule; memory plays no part in it."""

    def search(now: float, progress: tuple[Progress, ...]) -> int:
        alive = [i for i, one in enumerate(arrivals) if progress[i][1] < one.output_len and not is_lost(i, progress[i])]
        best = sum(
            progress[i][1] == one.output_len
            and _holds(one.request.arrival_s, one.request.slo, progress[i][2], progress[i][3], one.output_len)
            for i, one in enumerate(arrivals)
        )
        here = [i for i in alive if arrivals[i].request.arrival_s <= now + 1e-12]
        coming = [arrivals[i].request.arrival_s for i in alive if i not in here]
        if coming:
            best = max(best, search(min(coming), progress))
        shares = [_choices(arrivals[i].request.prompt_len, progress[i]) for i in here]
        for chosen in itertools.product(*shares):
            if any(chosen):
                best = max(best, search(*step(now, progress, dict(zip(here, chosen, strict=True)))))
                if best == len(arrivals):
                    return best
        return best

    def is_lost(i: int, progress: Progress) -> bool:
        one = arrivals[i]
        return progress[1] > 0 and not _holds(one.request.arrival_s, one.request.slo, progress[2], progress[3], 100)

    def step(now: float, progress: tuple[Progress, ...], chosen: dict[int, int]) -> tuple[float, tuple[Progress, ...]]:
        work = IterationWork()
        for i, num_tokens in chosen.items():
            prompt_len = arrivals[i].request.prompt_len
            if num_tokens and progress[i][1]:
                work.add_decode(prompt_len + progress[i][1])
            elif num_tokens:
                work.add_chunk(num_tokens, progress[i][0], is_last=progress[i][0] + num_tokens == prompt_len)
        end_s, after = now + COSTS.iteration_s(work), list(progress)
        for i, num_tokens in chosen.items():
            computed, generated, first_s, last_s = progress[i]
            if not num_tokens:
                continue
            computed += 0 if generated else num_tokens
            if computed == arrivals[i].request.prompt_len:
                first_s, last_s, generated = (first_s if generated else end_s), end_s, generated + 1
            after[i] = (computed, generated, first_s, last_s)
        return end_s, tuple(after)

    return search(0.0, tuple((0, 0, 0.0, 0.0) for _ in arrivals))


def _choices(prompt_len: int, progress: Progress) -> list[int]:
    computed, generated, _, _ = progress
    return [0, 1] if generated else list(range(0, prompt_len - computed + 1, STEP))


def goodput_of(name: str, arrivals: list[Arrival]) -> int:
    """Count the requests that hold their SLOs under this policy."""
    courses = PolicyRun(make_policy(name), DeviceMemory(100, 100, 16), IterationLimits(8, 512), COSTS).run(arrivals)
    times = [courses[str(one.request.request_id)].token_times_s for one in arrivals]
    return sum(
        _holds(one.request.arrival_s, one.request.slo, when[0], when[-1], one.output_len)
        for one, when in zip(arrivals, times, strict=True)
    )


@pytest.mark.parametrize("num_instances", [6, pytest.param(many(100), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("gap_s", "least"),
    [pytest.param(0.0, 0.9, id="together"), pytest.param(0.05, 0.8, id="some later", marks=pytest.mark.slow)],
)
def test_goodput_against_the_best_schedule(num_instances: int, gap_s: float, least: float) -> None:
    """The best schedule knows who is still to come; the oracle does not."""
    instances = [small_instance(seed, gap_s) for seed in range(num_instances)]
    best = [best_goodput(arrivals) for arrivals in instances]
    reached = [goodput_of("oracle", arrivals) for arrivals in instances]
    first_come = [goodput_of("sarathi", arrivals) for arrivals in instances]
    print(f"best {sum(best)}, oracle {sum(reached)}, sarathi {sum(first_come)}")
    assert all(one <= most for one, most in zip(reached, best, strict=True))
    assert sum(reached) >= least * sum(best)
    assert sum(reached) > sum(first_come)
