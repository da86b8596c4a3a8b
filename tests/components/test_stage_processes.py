"""Stages as processes: the same tokens as one process, and what happens when a stage dies."""

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from alignedserve import LLM, SamplingParams
from alignedserve.core.errors import ConfigError
from kernels.cpu.rank_exchange import ExchangeBroken

pytestmark = [pytest.mark.slow]

SAMPLING = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [f"what is {number} + {number + 3}?" for number in range(8)]


def stages_here() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if any("stage_process" in argument for argument in child.cmdline())
    ]


@pytest.fixture
def staged() -> Iterator[LLM]:
    llm = LLM("pocket", dtype="float32", memory_bytes=16 * 2**20, pipeline_parallel_size=2)
    yield llm
    llm.close()


def test_processes_generate_what_one_does(staged: LLM) -> None:
    one = LLM("pocket", dtype="float32", memory_bytes=16 * 2**20)
    expected = [output.token_ids for output in one.generate(PROMPTS, SAMPLING)]
    one.close()
    assert [output.token_ids for output in staged.generate(PROMPTS, SAMPLING)] == expected
    assert len(stages_here()) == 1
    staged.close()
    assert not stages_here()


def test_a_killed_stage_fails_the_next_step(staged: LLM) -> None:
    staged.generate(PROMPTS[:1], SAMPLING)
    (stage,) = stages_here()
    os.kill(stage.pid, signal.SIGKILL)
    with pytest.raises(ExchangeBroken):
        staged.generate(PROMPTS[:1], SAMPLING)


def test_adapters_are_refused() -> None:
    with pytest.raises(ConfigError, match="stages load no adapters"):
        LLM("pocket", pipeline_parallel_size=2, enable_lora=True)
