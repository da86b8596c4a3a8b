"""Stages as processes: the same tokens as one process, and what happens when a stage dies."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from alignedserve import LLM, LoRARequest, SamplingParams
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.named_models import pocket_folder
from kernels.cpu.rank_exchange import ExchangeBroken
from tests.support.child_processes import children_running
from tests.support.models.lora_folders import write_adapter

pytestmark = [pytest.mark.slow]

SAMPLING = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
STAGE = "plugins.stages"
PROMPTS = [f"what is {number} + {number + 3}?" for number in range(8)]


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
    assert len(children_running(STAGE)) == 1
    staged.close()
    assert not children_running(STAGE)


def test_a_killed_stage_fails_the_next_step(staged: LLM) -> None:
    staged.generate(PROMPTS[:1], SAMPLING)
    (stage,) = children_running(STAGE)
    stage.kill()
    with pytest.raises(ExchangeBroken):
        staged.generate(PROMPTS[:1], SAMPLING)


def test_each_stage_has_its_part_of_adapters(tmp_path: Path) -> None:
    model = read_config(pocket_folder())
    for seed, name in enumerate(("one", "two")):
        write_adapter(tmp_path / name, model, seed=seed)
    asked = [None, *(LoRARequest(name, tmp_path / name) for name in ("one", "two"))]
    found = []
    for size in (1, 2):
        llm = LLM("pocket", dtype="float32", memory_bytes=16 * 2**20, enable_lora=True, pipeline_parallel_size=size)
        outputs = llm.generate(["what is 4 + 5?"] * 3, SAMPLING, lora_request=asked)
        found.append([output.token_ids for output in outputs])
        llm.close()
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0]}) == 3
