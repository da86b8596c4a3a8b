"""Time that BROS takes to decide, by the time of the iterations that it decides on (Figure 14 of the paper).

    python -m benchmarks.scheduling.bros_overhead [--duration 20]

The load of `experiments.bros` on the paper's OPT-13B and OPT-30B workers: iterations are simulated, decisions are made
and timed as live ones (processor time of one core of this machine). The paper has 9.1 to 9.5 % of an iteration on
OPT-13B, 7.6 to 8.4 % on OPT-30B, all that its engine does between iterations included.
"""

import argparse
import contextlib
import time
from collections.abc import Iterator
from statistics import median
from typing import Any
from unittest import mock

from alignedserve.scheduling.policies.bros import Bros
from alignedserve.scheduling.policy import IterationPlan, WorkerView
from alignedserve.sim.sweep import run_cases
from benchmarks.support.recording import write_result
from experiments.bros import BrosLoad

RATES = (2.0, 10.0, 18.0)
MODELS = ("opt-13b", "opt-30b")


@contextlib.contextmanager
def timed_decisions() -> Iterator[list[float]]:
    """Time every decision that schedules something; the list has their seconds."""
    decisions_s: list[float] = []
    plan = Bros.plan

    def timed(policy: Bros, view: WorkerView) -> IterationPlan:
        began = time.thread_time()
        planned = plan(policy, view)
        if planned.scheduled:
            decisions_s.append(time.thread_time() - began)
        return planned

    with mock.patch.object(Bros, "plan", timed):
        yield decisions_s


def measure(model: str, rate: float, duration_s: float) -> dict[str, Any]:
    """Return the mean and median of decisions and the mean of the iterations at one point."""
    case = BrosLoad(model, rate).case("overhead", "bros", 1, duration_s).case
    with timed_decisions() as decisions_s:
        result = run_cases([case])[0].result
    assert result is not None, "the simulation failed"
    (worker,) = result.workers
    busy_s = worker.utilisation * result.duration_s
    decision_s, iteration_s = sum(decisions_s) / worker.num_iterations, busy_s / worker.num_iterations
    return {
        "model": model,
        "rate": rate,
        "decision_ms": round(1000 * decision_s, 3),
        "decision_ms_p50": round(1000 * median(decisions_s), 3),
        "iteration_ms": round(1000 * iteration_s, 2),
        "share": round(decision_s / (decision_s + iteration_s), 4),
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=20.0)
    options = parser.parse_args()
    points = []
    for model in MODELS:
        for rate in RATES:
            points.append(measure(model, rate, options.duration))
            print(points[-1], flush=True)
    print(write_result("bros_overhead", {"duration_s": options.duration, "points": points}))


if __name__ == "__main__":
    main()
