"""What it costs to keep the course of a call, and to make the spans of its trace: processor time of one thread.

`python -m benchmarks.serving.request_courses` prints medians of rounds.
"""

import statistics
import time

from alignedserve.api.timelines.spans import Origin, export_of
from alignedserve.api.timelines.timeline import CallFacts, Timeline
from alignedserve.api.timelines.timelines import Timelines
from alignedserve.config.sections import ExplainConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, SamplingParams
from alignedserve.messages.request_notes import RequestNote, RequestsNoted, Step

_NUM_CALLS, _NUM_ROUNDS = 1000, 7
_STEPS = (
    *(("router", Step.QUEUED), ("router", Step.DISPATCHED), ("decode-0", Step.ACCEPTED), ("decode-0", Step.STARTED)),
    *(("router", Step.PREDICTED), ("decode-0", Step.PREFILLED), ("decode-0", Step.JOINED), ("decode-0", Step.FINISHED)),
)


def main() -> None:
    """Measure and print."""
    kept, traced, num_spans = [], [], 0
    for _ in range(_NUM_ROUNDS):
        timelines = Timelines(ExplainConfig(), traced_ratio=1.0)
        started_s = time.thread_time()
        calls = [_kept_call(index, timelines) for index in range(_NUM_CALLS)]
        kept.append(time.thread_time() - started_s)
        started_s = time.thread_time()
        message, num_spans = export_of(calls, Origin("alignedserve", "gateway-0"))
        message.SerializeToString()
        traced.append(time.thread_time() - started_s)
    print(f"kept: {_median_us(kept):.0f} µs a call with {len(_STEPS) + 4} steps")
    print(f"traced: {_median_us(traced):.0f} µs a call, {num_spans / _NUM_CALLS:.0f} spans")


def _median_us(rounds: list[float]) -> float:
    return statistics.median(rounds) / _NUM_CALLS * 1e6


def _kept_call(index: int, timelines: Timelines) -> Timeline:
    """Keep a whole call as its generation and its rooms tell it."""
    http_id, now = f"{index:032x}", time.monotonic()
    request = Request(RequestId(f"{http_id}-0"), (1,) * 6, SamplingParams(), "gateway-0", now)
    trace = timelines.trace_of({})
    facts = CallFacts(f"chatcmpl-{http_id}", http_id, None, "anyone", "pocket", "default", 6, now, time.time(), trace)
    timeline = timelines.begin(facts, [request])
    timeline.first_token(0, now + 0.01, 0)
    for place, (source, step) in enumerate(_STEPS):
        note = RequestNote(request.request_id, step, now + 0.001 * place, 1, None, "decode-0", 6, 2, 59, 7.0)
        timelines.take(source, RequestsNoted((note,)))
    timeline.choice_ended(0, now + 0.5, num_tokens=60, finish_reason="length")
    timelines.end(timeline)
    return timeline


if __name__ == "__main__":
    main()
