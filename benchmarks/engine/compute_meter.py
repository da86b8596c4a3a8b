"""The seconds that requests computed: what measuring them costs a worker and a gateway per iteration.

A worker's part is to split an iteration's time among its requests and to put their shares into its message; a gateway's
part is to add them up. The message is longer by the shares: that is in both. What it is compared with is the median
iteration of 64 requests of the pocket model's shape (`benchmarks.engine.iteration_gap`).

    python -m benchmarks.engine.compute_meter  # fails above 1 % of that iteration
"""

import itertools
import statistics
import time
from collections.abc import Callable

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, SampledToken, SamplingParams
from alignedserve.messages.gateways import TokenDelta, TokensEmitted
from alignedserve.messages.iterations import Addition, IterationCompleted, IterationTimes, RunIteration
from alignedserve.messages.links import GatewayInbound
from alignedserve.messages.wire import Codec
from alignedserve.worker_core.compute_meter import ComputeMeter
from benchmarks.engine.iteration_gap import NUM_REQUESTS, serve_peer
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result

NUM_ITERATIONS = 5_000
ROUNDS = 5
PROMPT_LEN = 16
MAX_SHARE = 0.01
CODEC = Codec(GatewayInbound)


def cost_s(num_running: int) -> tuple[float, float]:
    """Return the seconds that an iteration of so many decodes costs its worker and its gateway more."""
    requests = [
        Request(RequestId(f"{number:032x}"), (1,) * PROMPT_LEN, SamplingParams(), "unix:nowhere", 0.0)
        for number in range(num_running)
    ]
    slices = tuple((request.request_id, 1) for request in requests)
    additions = tuple(Addition(request, (), ()) for request in requests)
    deltas = tuple(TokenDelta(request.request_id, 7, (5,)) for request in requests)
    sampled = tuple(SampledToken(request.request_id, 5) for request in requests)
    plain, meter = TokensEmitted(deltas), ComputeMeter()
    meter.commanded(RunIteration((), additions, (), slices))
    following = RunIteration((), (), (), slices)
    ended = IterationCompleted(sampled, times=IterationTimes(1.0, 1.02, 0.0, 0.02, 0.0))

    def measure() -> bytes:
        meter.happened(ended)
        meter.commanded(following)
        payload = CODEC.encode(meter.told(plain))
        meter.left_over()
        return payload

    streams = dict.fromkeys((request.request_id for request in requests), 0.0)

    def take(payload: bytes) -> None:
        message = CODEC.decode(payload)
        assert isinstance(message, TokensEmitted)
        for delta, compute_s in zip(message.deltas, message.compute_s or itertools.repeat(0.0), strict=False):
            streams[delta.request_id] += compute_s

    def take_plain(payload: bytes) -> None:
        message = CODEC.decode(payload)
        assert isinstance(message, TokensEmitted)
        for delta in message.deltas:
            streams.get(delta.request_id)

    with_shares, without = measure(), CODEC.encode(plain)
    worker_s = seconds_of(measure) - seconds_of(lambda: CODEC.encode(plain))
    gateway_s = seconds_of(lambda: take(with_shares)) - seconds_of(lambda: take_plain(without))
    return worker_s, gateway_s


def seconds_of(action: Callable[[], object]) -> float:
    """Return the processor seconds of one call, in the quickest of some rounds."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        for _ in range(NUM_ITERATIONS // ROUNDS):
            action()
        rounds.append((time.thread_time() - began) / (NUM_ITERATIONS // ROUNDS))
    return min(rounds)


def main() -> None:
    """Measure, print, record, and fail where it is dear."""
    parser_of(__doc__).parse_args()
    _, iteration_log = serve_peer(PROMPT_LEN)
    iteration_s = statistics.median(one.wall_s for one in iteration_log.records() if one.batch_size == NUM_REQUESTS)
    rows = []
    for num_running in (1, 8, NUM_REQUESTS, 256):
        worker_s, gateway_s = cost_s(num_running)
        rows.append({"running": num_running, "worker_us": 1e6 * worker_s, "gateway_us": 1e6 * gateway_s})
        print({name: round(value, 2) for name, value in rows[-1].items()})
    share = 1e-6 * rows[2]["worker_us"] / iteration_s
    print(f"an iteration of {NUM_REQUESTS}: {1e3 * iteration_s:.2f} ms, of which measuring is {share:.3%}")
    figures = [{name: round(value, 2) for name, value in row.items()} for row in rows]
    write_result(
        "engine/compute_meter",
        {"iteration_ms": round(1e3 * iteration_s, 3), "share_of_iteration": round(share, 6), "costs": figures},
    )
    assert share < MAX_SHARE, "measuring costs too much"


if __name__ == "__main__":
    main()
