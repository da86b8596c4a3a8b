"""Shift of the mix of work on a live server: long prompts with short answers, then short prompts with long answers.

    python -m benchmarks.serving.mix_shift [--system one two separate] [--load 1.0]

The 125M OPT shape in bfloat16, the default policy, each system on a fresh server, the same requests for all. Half a
minute of each shape at rates that keep the cores busy for about as long (`--load` multiplies both). `shares`: the
percentage with both objectives held of what came in each 2 s. Target: absorbed within 10 s of the shift. Its simulated
counterpart, on four GPUs, is `benchmarks.simulation.shifts`.
"""

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from alignedserve.core.request import Slo
from alignedserve.loadgen.client import CompletionApi, CompletionOutcome, OpenAiClient
from alignedserve.loadgen.load_generator import LoadGenerator, SentRequest
from alignedserve.loadgen.load_plan import LoadPlan, LoadRequest, TrafficClass
from alignedserve.loadgen.prompts import CallMaker, load_tokenizer
from alignedserve.loadgen.summary import LoadReport, summarise
from benchmarks.scheduling.live_policies import load, make_model, served
from benchmarks.serving.elastic_workers import POLICY, SLOW_REAL_TIME, WARM_UP_S, System
from benchmarks.simulation.shifts import HALF_S, STEP_S, absorbed_after_s
from benchmarks.support.recording import write_result

NAME = "mix_shift"
SLO = Slo(ttft_s=0.8, tpot_s=0.1)
SYSTEMS = {"one": System("elastic", 1), "two": System("elastic", 2), "separate": System("disaggregated", 1)}


class Half(NamedTuple):
    """Requests of one shape: lengths between half and one and a half times these."""

    prompt_len: int
    output_len: int
    rate: float  # per second


HALVES = (Half(400, 10, 4.0), Half(40, 100, 2.2))


def planned(rate_factor: float, seed: int = 0) -> LoadPlan:
    """Return both halves, one after the other, with a class for each step of time."""
    rng = random.Random(seed)
    requests: list[LoadRequest] = []
    for number, half in enumerate(HALVES):
        now = number * HALF_S
        while (now := now + rng.expovariate(rate_factor * half.rate)) < (number + 1) * HALF_S:
            prompt_len, output_len = (
                max(1, round(rng.uniform(0.5, 1.5) * length)) for length in (half.prompt_len, half.output_len)
            )
            requests.append(LoadRequest(len(requests), _step_name(now), now, prompt_len, output_len))
    classes = tuple(TrafficClass(name, SLO) for name in _step_names())
    return LoadPlan(classes, tuple(requests))


def _step_names() -> list[str]:
    return [_step_name(number * STEP_S) for number in range(round(len(HALVES) * HALF_S / STEP_S))]


def _step_name(arrival_s: float) -> str:
    return f"step {int(arrival_s / STEP_S):02}"


async def sent(plan: LoadPlan, port: int, tokenizer: Path) -> LoadReport:
    """Send the requests of a plan at their time, and return what clients saw."""
    classes = {traffic.name: traffic for traffic in plan.classes}
    async with OpenAiClient(url=f"http://127.0.0.1:{port}", api_key=None, timeout_s=120.0) as client:
        model = await client.model_name()
        maker = CallMaker(model=model, endpoint=CompletionApi.COMPLETIONS, seed=0, ignore_eos=True)
        count_tokens = load_tokenizer(tokenizer)
        for request in plan.open_requests:
            maker.prepare(request, count_tokens)

        async def send(request: LoadRequest, outcome: CompletionOutcome) -> None:
            await client.complete(maker.call(request, classes[request.class_name]), outcome)

        def ignore(_: SentRequest) -> None:
            pass

        run = await LoadGenerator(plan=plan, send=send, on_done=ignore, cuts_off=False).run()
    return summarise(run, plan.classes)


def measure(folder: Path, system: System, plan: LoadPlan) -> dict[str, Any]:
    """Return the share of requests that held their objectives, by the time at which they came."""
    counts = (f"decode.count={system.num_workers}",)
    with served(folder, POLICY, system.topology, more_settings=counts) as port:
        load(port, folder, [SLOW_REAL_TIME], WARM_UP_S)
        report = asyncio.run(sent(plan, port, folder))
    assert report.total.num_completed == report.total.num_sent, "a request failed"
    by_name = {one.name: one.slo_attainment for one in report.classes}
    shares = [_percent(by_name.get(name)) for name in _step_names()]
    return {
        "attained": _percent(report.total.slo_attainment),
        "absorbed_after_s": absorbed_after_s(shares),
        "num_requests": report.total.num_sent,
        "shares": shares,
    }


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--load", type=float, default=1.0)
    options = parser.parse_args(arguments)
    plan = planned(options.load)
    figures: dict[str, Any] = {"halves": [half._asdict() for half in HALVES], "load": options.load, "systems": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "opt-125m"
        make_model(folder)
        for system in options.system:
            figures["systems"][system] = measure(folder, SYSTEMS[system], plan)
            print(system, figures["systems"][system], flush=True)
    print(write_result(NAME, figures))


if __name__ == "__main__":
    main()
