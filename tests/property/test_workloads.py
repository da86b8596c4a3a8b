"""Random lines of the language of workloads: whatever they say, what comes out keeps the rules."""

import pickle
import random

from alignedserve.core.request import RequestClass
from lab.workload.build import build_workload
from lab.workload.catalogue import Library
from lab.workload.requests import ClosedLoopRun, TimedRequest, Workload
from tests.support.marks import each

LIBRARY = Library()


def random_class(rng: random.Random, name: str) -> str:
    lengths = rng.choice(
        ["sharegpt", "azure_conv_slice, output=uniform(1,50)", "prompt=mix(9: 50, 1: 4000), output=skewed(40,80)"]
    )
    settings = [
        lengths,
        rng.choice([f"rate={rng.uniform(0.5, 9)}, cv={rng.choice([0, 1, 4])}", "rate=3, arrivals=weibull, cv=2"]),
        rng.choice(["max_total=5000", "max_prompt=700", "max_tokens=30"]),
        rng.choice(["ttft=uniform(1,2), tpot=0.1", "deadline=60", "be_share=0.5, ttft=1, deadline=9", "priority=3"]),
        rng.choice(["predict=mean", "predict=error(1)", "predict=exact"]),
    ]
    if rng.random() < 0.3:
        settings[1] = rng.choice(["outstanding=7", "wave=5"])
    if rng.random() < 0.2:
        settings[:2] = ["azure_conv_slice", f"arrivals=recorded, rate={rng.uniform(1, 20)}, repeat=yes, start=30"]
    return f"{name}: {', '.join(settings)}"


@each("seed", range(25))
def test_every_workload_keeps_the_rules(seed: int) -> None:
    rng = random.Random(seed)
    line = "; ".join(random_class(rng, name) for name in ["a", "b", "c"][: rng.randint(1, 3)])
    workload = build_workload(line, seed=seed, library=LIBRARY, duration_s=40.0)
    assert pickle.loads(pickle.dumps(workload)).requests == workload.requests  # it goes to other processes
    arrivals = [request.arrival_s for request in workload.requests]
    assert arrivals == sorted(arrivals)
    assert all(0 <= arrival_s < 40.0 for arrival_s in arrivals)
    closed = served(workload, random.Random(seed))
    assert closed == served(build_workload(line, seed=seed, library=LIBRARY, duration_s=40.0), random.Random(seed))
    for request in (*workload.requests, *closed):
        check(request, line)


def check(request: TimedRequest, line: str) -> None:
    own = next(part for part in line.split(";") if part.strip().startswith(f"{request.class_name}:"))
    assert request.prompt_len >= 1
    assert request.output_len >= 1
    assert request.max_tokens is None or request.output_len <= request.max_tokens
    assert request.predicted_len is not None
    assert request.predicted_len >= 1
    if "max_total" in own:
        assert request.final_context_len <= 5000
    if "max_prompt" in own:
        assert request.prompt_len <= 700
    if "be_share" in own:
        is_best_effort = request.request_class is RequestClass.BEST_EFFORT
        assert (request.slo.ttft_s, request.slo.deadline_s) == ((None, 9.0) if is_best_effort else (1.0, None))


def served(workload: Workload, rng: random.Random) -> list[TimedRequest]:
    """Return the closed-loop requests, with servers that take their time; never more in the air than asked for."""
    run = ClosedLoopRun(workload)
    sizes = {loop.class_name: loop.size for loop in workload.closed_loops}
    waiting, seen, now_s = run.first(), [], 0.0
    while waiting:
        seen.append(waiting.pop(rng.randrange(len(waiting))))
        now_s += rng.expovariate(2.0)
        waiting += run.next_after(seen[-1].class_name, now_s)
        for name, size in sizes.items():
            assert sum(request.class_name == name for request in waiting) <= size
    return seen
