"""Whole answers of a GGUF file's model, through the engine and the scheduler."""

from pathlib import Path

from alignedserve.core.request import SamplingParams
from alignedserve.offline.llm import LLM
from tests.support.tiny_gguf import write_tiny_gguf


def test_answers_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", "llama", ("Q4_K", "Q6_K", "Q8_0"))
    llm = LLM(str(path), memory_bytes=8 << 20)
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    together = llm.chat(["hello", "a longer question than the first", "hello"], greedy)
    (alone,) = llm.chat(["a longer question than the first"], greedy)
    llm.close()
    assert together[0].token_ids == together[2].token_ids
    assert together[1].token_ids == alone.token_ids
    assert len(alone.token_ids) > 0
