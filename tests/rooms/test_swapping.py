"""A colocated worker whose memory is too small for all that it runs: whole caches go to host memory and come back."""

import asyncio
from pathlib import Path

from alignedserve.config.sections import SchedulingConfig, Topology
from alignedserve.core.request import SamplingParams
from alignedserve.messages.iterations import IterationCompleted, RunIteration
from tests.in_process import CountingEngine, RoomCluster, small_config


class SwapCounter:
    """Counts the caches that an engine swaps out and in."""

    def __init__(self, engine: CountingEngine) -> None:
        self.num_outs = self.num_ins = 0
        self._perform = engine.run_iteration
        engine.run_iteration = self.run_iteration  # type: ignore[method-assign]

    def run_iteration(self, command: RunIteration) -> IterationCompleted:
        """The engine's own, counted."""
        if command.swaps is not None:
            self.num_outs += len(command.swaps.outs)
            self.num_ins += len(command.swaps.ins)
        return self._perform(command)


async def test_answers_are_as_if_nobody_had_been_swapped_out(tmp_path: Path) -> None:
    scheduling = SchedulingConfig(policy="fcfs", settings={"preemption": "swap"})
    config = small_config(tmp_path / "model", topology=Topology.COLOCATED, scheduling=scheduling, decode_blocks=24)
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompts = [[3 + (7 * number + position) % 120 for position in range(10 + 3 * number)] for number in range(8)]
    cluster = RoomCluster(config, tmp_path)
    await cluster.start()
    try:
        swaps = SwapCounter(cluster.engines["decode-0"])
        answers = await asyncio.gather(*(cluster.gateway.generate(prompt, sampling) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == cluster.reference(prompt, sampling)
            assert answer.num_repeats == 0
        status = await cluster.gateway.idle()
    finally:
        await cluster.close()
    assert swaps.num_outs == swaps.num_ins == status.num_evictions > 0
