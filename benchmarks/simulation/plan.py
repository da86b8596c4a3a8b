"""Time of `alignedserve plan`: an hour of conversations on eight accelerators.

    python -m benchmarks.simulation.plan    # target: 10 minutes on two cores

Recorded arrivals of the Azure conversations at `--rate` requests per second, repeated until the hour is full. Beside
the wall-clock time it records the processor time of all processes: on a busy machine only that can be compared.
"""

import argparse
import os
import resource
import time

from alignedserve.cli.commands.options import PlanOptions
from alignedserve.cli.commands.plan_request import asked_for
from alignedserve.planning.plan import make_plan
from alignedserve.planning.report import candidates_table, summary
from alignedserve.sim.sweep import CasePool, CaseProgress
from benchmarks.support.recording import write_result


def main() -> None:
    """Plan; print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=12.0, help="requests per second")
    parser.add_argument("--duration-s", type=float, default=3600.0)
    parser.add_argument("--hardware", default="8x h100 @2.5")
    parser.add_argument("--model", default="llama-2-13b")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    line = f"azure_conv, arrivals=recorded, repeat=yes, rate={arguments.rate:g}, ttft=1, tpot=0.05"
    options = PlanOptions(
        workload=line, hardware=arguments.hardware, model=arguments.model, duration_s=arguments.duration_s
    )
    rounds = _Rounds()
    began_s = time.monotonic()
    with CasePool(arguments.processes) as pool:
        plan = make_plan(asked_for(options).request, pool, rounds.note)
    wall_s = time.monotonic() - began_s
    used = [resource.getrusage(one) for one in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    figures = {
        "workload": line,
        "duration_s": arguments.duration_s,
        "hardware": arguments.hardware,
        "model": arguments.model,
        "processes": arguments.processes,
        "wall_s": round(wall_s, 1),
        "cpu_s": round(sum(one.ru_utime + one.ru_stime for one in used), 1),
        "num_simulations": plan.num_simulations,
        "num_plans": len(plan.tried),
        "num_requests": sum(plan.goals.num_requests.values()),
        "num_windows": len(plan.groups),
        "summary": summary(plan),
        "confidence": list(plan.cautions),
        "variations": {one.words: "holds" if one.holds else "does not hold" for one in plan.variations},
        "plans": [dict(zip(candidates_table(plan).headings, row, strict=True)) for row in candidates_table(plan).rows],
        "seconds": rounds.seconds,
    }
    print(figures, flush=True)
    write_result("plan", figures)


class _Rounds:
    """Wall-clock seconds by what was simulated."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._words, self._since_s = "reading the workload", time.monotonic()

    def note(self, words: str, case: CaseProgress | None) -> None:
        """See Note of make_plan."""
        now = time.monotonic()
        self.seconds[self._words] = round(self.seconds.get(self._words, 0.0) + now - self._since_s, 3)
        self._words, self._since_s = words, now
        if case is None:
            print(f"{now:.0f} s: {words}", flush=True)


if __name__ == "__main__":
    main()
