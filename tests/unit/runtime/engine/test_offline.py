"""The engine in this process, by its public names."""

import subprocess
import sys

import pytest

from alignedserve import LLM, SamplingParams
from alignedserve.core.errors import ContextTooLong, InvalidRequest
from alignedserve.core.request import FinishReason


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("pocket", memory_bytes=16 * 2**20)


def test_answers_end_by_themselves(llm: LLM) -> None:
    outputs = llm.chat(["who are you?", "count from 3 to 9"])
    assert all(output.finish_reason is FinishReason.STOP for output in outputs)
    assert all(output.text for output in outputs)


def test_companions_change_nothing(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    prompts = [f"count from {number} to 40" for number in range(20)]
    together = llm.generate(prompts, sampling)
    alone = [llm.generate([prompt], sampling)[0] for prompt in prompts]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]


def test_a_prompt_longer_than_the_context_is_refused(llm: LLM) -> None:
    with pytest.raises(ContextTooLong, match="2048"):
        llm.generate(["a " * 3000])


def test_a_cache_smaller_than_the_context_holds_what_fits() -> None:
    small = LLM("pocket", memory_bytes=4 * 2**20)
    assert small.chat(["spell otter"])[0].finish_reason is FinishReason.STOP
    with pytest.raises(InvalidRequest, match="more KV cache than memory_bytes allows"):
        small.generate(["a " * 1500])
    small.close()


def test_importing_the_package_loads_nothing() -> None:
    code = "import alignedserve, sys; assert not {'torch', 'ray', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
