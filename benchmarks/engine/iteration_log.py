"""The decode worker's iteration log: its cost per iteration, and whether its parts add up to the time that passed.

The cost is that of one iteration's two calls and its share of a report, with 64 and 128 running: while a batch goes on,
and when it changes in every iteration. What it is compared with, and where the parts must add up, is a real run: a
model of the pocket model's shape in a colocated worker, 64 requests of a peer process.

Then what is claimed as lost to padding, beside what attention really loses to it.

    python -m benchmarks.engine.iteration_log  # fails above 1 % of the median iteration, or off the wall time by 2 %
"""

import math
import statistics
import time
from typing import Any

import torch

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, SampledToken, SamplingParams
from alignedserve.messages.iterations import IterationCompleted, IterationTimes
from alignedserve.runtime.attention.torch_backend import CALL_BYTES
from alignedserve.worker_core.iteration_log import IterationLog
from benchmarks.engine.iteration_gap import NUM_REQUESTS, serve_peer
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from decode_worker.state import RunningRequest
from kernels.attention import GatherBuffers, RunSelection, attend_decode

NUM_ITERATIONS = 20_000
ITERATIONS_PER_REPORT = 100
PROMPT_LEN = 16  # the shortest iterations
NUM_LAYERS = 5
BLOCK_SIZE, KV_HEADS, HEAD_DIM, NUM_STORED = 16, 2, 64, 8192  # of the pocket model, in float32
PADDED = ((4, 5), (8, 5), (16, 5), (4, 10), (8, 10), (4, 20), (4, 50), (4, 120))  # sequences, blocks of the longest
MAX_COST, MAX_GAP = 0.01, 0.02


def measure_cost(num_running: int, *, is_changing: bool) -> float:
    """Return the seconds per iteration."""
    sampling = SamplingParams(max_tokens=NUM_ITERATIONS)
    running = {}
    for number in range(num_running):
        asked = Request(RequestId(f"r{number}"), (1,) * (PROMPT_LEN + number), sampling, "unix:nowhere", 0.0)
        running[asked.request_id] = RunningRequest(asked, 1, [], [], PROMPT_LEN)
    sampled = tuple(SampledToken(request_id, 5) for request_id in running)
    iteration_log = IterationLog()
    began = time.perf_counter()
    for iteration in range(NUM_ITERATIONS):
        now = 0.01 * iteration
        iteration_log.iteration_started(now, running.values(), has_changed=is_changing)
        for _ in range(2 * NUM_LAYERS):
            time.perf_counter()  # as the decoder does around attention
        times = IterationTimes(now + 1e-4, now + 9e-3, 1e-3, 6e-3, 1e-3, 1e-3, 0.1)
        iteration_log.iteration_completed(now + 0.01, IterationCompleted(sampled, times=times))
        if iteration % ITERATIONS_PER_REPORT == 0:
            iteration_log.take_totals(now + 0.01)
    return (time.perf_counter() - began) / NUM_ITERATIONS


def measure_run() -> dict[str, Any]:
    """Measure one real run: medians of iterations in which all decode, and the parts beside two kinds of wall time."""
    stamps, iteration_log = serve_peer(PROMPT_LEN)
    records = iteration_log.records()
    assert len(stamps) == len(records), "an iteration without a forward pass, or more of them than records"
    full = [
        record
        for record, stamp in zip(records, stamps, strict=True)
        if record.batch_size == NUM_REQUESTS == stamp[2]  # one token each
    ]
    # Ours and theirs: from the end of the first forward pass to that of the last.
    passed_s = stamps[-1][1] - stamps[0][1]
    parts_s = math.fsum(record.parts_s for record in records[1:])
    off = [abs(1.0 - record.parts_s / record.wall_s) for record in full]
    medians = {
        name.replace("_s", "_ms"): round(1e3 * statistics.median(getattr(record, name) for record in full), 4)
        for name in ("wall_s", "turnaround_s", "prepare_s", "forward_s", "sampling_s", "attention_s", "misaligned_s")
    }
    return {
        "running": NUM_REQUESTS,
        "iterations": len(full),
        **medians,
        "parts_over_wall": round(parts_s / math.fsum(record.wall_s for record in records[1:]), 5),
        "parts_over_time_passed": round(parts_s / passed_s, 5),
        "one_iteration_off_by_p50": round(statistics.median(off), 5),
        "one_iteration_off_by_p99": round(statistics.quantiles(off, n=100)[98], 5),
    }


def measure_padding(count: int, num_blocks: int) -> dict[str, Any]:
    """Measure one call of decode attention for `count` sequences, half of them a fifth shorter than the others: what
    the log claims as lost to padding, and what is lost beside the mean of two calls, one all long and one all
    short.
    """
    num_short = num_blocks * 4 // 5
    padded_s, short_s = attention_s(count, (num_blocks, num_short))
    num_read, block_bytes = count * num_blocks, 2 * 4 * BLOCK_SIZE * KV_HEADS * HEAD_DIM
    share = count // 2 * (num_blocks - num_short) / (num_read + CALL_BYTES / block_bytes)
    return {
        "sequences": count,
        "blocks": num_blocks,
        "call_us": round(1e6 * padded_s, 1),
        "claimed_us": round(1e6 * padded_s * share, 1),
        "lost_us": round(1e6 * (padded_s - short_s) / 2, 1),
    }


@torch.inference_mode()
def attention_s(count: int, widths: tuple[int, ...]) -> list[float]:
    """Return seconds of one call by its number of blocks: lower quartiles of calls in turns, as many are disturbed."""
    runs = torch.randn(NUM_STORED, BLOCK_SIZE * KV_HEADS * HEAD_DIM)
    queries = torch.randn(count, KV_HEADS, 2, HEAD_DIM)
    buffers = GatherBuffers(torch.device("cpu"))
    masks = [torch.zeros(count, 1, 1, width * BLOCK_SIZE) for width in widths]
    seconds: list[list[float]] = [[] for _ in widths]
    for turn in range(1000):
        which = turn % len(widths)
        # Other blocks every time: those of a layer are cold when its turn comes.
        run_ids = torch.randint(0, NUM_STORED, (count * widths[which],))
        began = time.perf_counter()
        attend_decode(queries, runs, runs, RunSelection(run_ids), masks[which], buffers)
        seconds[which].append(time.perf_counter() - began)
    return [statistics.quantiles(times, n=4)[0] for times in seconds]


def main() -> None:
    """Measure, print, record, and fail where the log is dear or does not add up."""
    parser_of(__doc__).parse_args()
    run = measure_run()
    costs = [
        {
            "running": num_running,
            "is_changing": is_changing,
            "cost_us": round(1e6 * (cost := measure_cost(num_running, is_changing=is_changing)), 2),
            "share_of_iteration": round(cost / (1e-3 * run["wall_ms"]), 5),
        }
        for num_running in (64, 128)
        for is_changing in (False, True)
    ]
    padding = [measure_padding(count, num_blocks) for count, num_blocks in PADDED]
    for row in (run, *costs, *padding):
        print(row)
    write_result("engine/iteration_log", {"run": run, "costs": costs, "padding": padding})
    assert all(row["share_of_iteration"] < MAX_COST for row in costs), "the iteration log costs too much"
    for name in ("parts_over_wall", "parts_over_time_passed"):
        assert abs(1.0 - run[name]) < MAX_GAP, f"{name}: the parts do not add up"


if __name__ == "__main__":
    main()
