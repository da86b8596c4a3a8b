"""What our scheduler adds to a step of vLLM's: over plain stand-ins for vLLM's requests, without vLLM.

    python -m benchmarks.vllm.step_cost

Seconds are the processor's, so other work on the machine does not count. A quarter of the requests are chats. Steady:
everybody decodes, so a plan serves 16 steps. Planned: every step has a plan, as while requests come and go. A step
counts from the layout of vLLM's queues to the costs learned from it.
"""

import itertools
import statistics
import time
from typing import Any

from alignedserve.costmodel.linear import LinearCoefficients
from alignedserve.costmodel.online import OnlineIterationModel
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from benchmarks.vllm.stand_ins import StandInOutput, StandInRequest, StandInScheduler
from plugins.vllm import names
from plugins.vllm.scheduling import Planner
from plugins.vllm.terms import DEFAULT_SLO

STEP_S, CONTEXT, ROUNDS_APART = 0.03, 200, 5
COSTS = LinearCoefficients(base_s=0.01, prompt_token_s=0.00002, decode_s=0.00005)


def planner_of(num_requests: int) -> Planner:
    """Return a planner over this many requests that decode."""
    requests = []
    for number in range(num_requests):
        xargs: dict[str, Any] = {"service_class": "document"} if number % 4 else {}
        request = StandInRequest(f"r{number}", CONTEXT, 3000, xargs=xargs, status="RUNNING", arrival_time=time.time())
        request.num_computed_tokens, request.num_output_tokens = CONTEXT, 1
        requests.append(request)
    scheduler = StandInScheduler(*requests, num_blocks=100_000)
    scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = 2 * num_requests
    return Planner(scheduler, DEFAULT_SLO, costs=OnlineIterationModel(COSTS))


def steps_of(planner: Planner, num_steps: int, *, is_planned: bool) -> list[float]:
    """Return the seconds that steps take beside vLLM's own work."""
    scheduler, now, taken_s = planner.scheduler, 1000.0, []
    for _ in range(num_steps):
        if is_planned:
            planner._num_alike = 0
        began_s = time.thread_time()
        layout = planner.lay_out(now)
        assert layout is not None, "vLLM's own order"
        with names.laid_out(scheduler, layout):
            laid_s = time.thread_time() - began_s
            budget = layout.num_tokens
            computed = scheduler.running[:budget]
            output = StandInOutput({request.request_id: 1 for request in computed})
            began_s = time.thread_time()
        planner.scheduled(output, now)
        laid_s += time.thread_time() - began_s
        for request in computed:
            request.num_computed_tokens += 1
            request.num_output_tokens += 1
        now += STEP_S
        began_s = time.thread_time()
        planner.completed(output, now)
        taken_s.append(laid_s + time.thread_time() - began_s)
    return taken_s[num_steps // 10 :]


def main() -> None:
    """Measure each size in turn; print the best and the middle of the rounds, and write the record."""
    parser = parser_of(__doc__, rounds=ROUNDS_APART, name="vllm/step_cost")
    parser.add_argument("--requests", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--steps", type=int, default=600)
    arguments = parser.parse_args()
    rows = []
    for num_requests, is_planned in itertools.product(arguments.requests, (False, True)):
        rounds = [
            steps_of(planner_of(num_requests), arguments.steps, is_planned=is_planned) for _ in range(arguments.rounds)
        ]
        means_ms = sorted(1000 * statistics.mean(taken_s) for taken_s in rounds)
        medians_ms = sorted(1000 * statistics.median(taken_s) for taken_s in rounds)
        row = {
            "num_requests": num_requests,
            "steps": "planned" if is_planned else "steady",
            "mean_ms": statistics.median(means_ms),
            "median_ms": statistics.median(medians_ms),
            "best_round_mean_ms": means_ms[0],
        }
        rows.append(row)
        print(
            " ".join(f"{name} {value:.3f}" if isinstance(value, float) else str(value) for name, value in row.items())
        )
    write_result(arguments.name, rows)


if __name__ == "__main__":
    main()
