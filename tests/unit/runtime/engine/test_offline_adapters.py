"""Adapters by the Python API: each prompt with its own, and none for the others."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from alignedserve import LLM, LoRARequest, SamplingParams
from alignedserve.core.errors import AdapterError, InvalidRequest, ModelError
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.named_models import pocket_folder
from tests.support.models.lora_folders import write_adapter

PROMPTS = ["what is 4 + 5?", "spell otter"]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM("pocket", memory_bytes=16 * 2**20, enable_lora=True)
    yield made
    made.close()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder, model = tmp_path_factory.mktemp("adapters"), read_config(pocket_folder())
    for seed, name in enumerate(("one", "two")):
        write_adapter(folder / name, model, seed=seed)
    return [LoRARequest(name, folder / name) for name in ("one", "two")]


def tokens_of(llm: LLM, prompts: list[str], asked: LoRARequest | list[LoRARequest | None] | None) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, GREEDY, lora_request=asked)]


def test_each_prompt_has_its_adapter_and_companions_change_nothing(llm: LLM, adapters: list[LoRARequest]) -> None:
    each: list[LoRARequest | None] = [None, *adapters]
    together = tokens_of(llm, [PROMPTS[0]] * 3, each)
    assert together == [tokens_of(llm, PROMPTS[:1], [adapter])[0] for adapter in each]
    assert together[0] == tokens_of(LLM("pocket", memory_bytes=16 * 2**20), PROMPTS[:1], None)[0]
    assert len({tuple(tokens) for tokens in together}) == 3
    assert tokens_of(llm, PROMPTS, adapters[0]) == tokens_of(llm, PROMPTS, [adapters[0], adapters[0]])


def test_what_does_not_fit_is_refused_before_anything_is_generated(
    llm: LLM, adapters: list[LoRARequest], tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match="one for each prompt"):
        llm.generate(PROMPTS, lora_request=[adapters[0]])
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        llm.generate(PROMPTS, lora_request=LoRARequest("gone", tmp_path))
    without = LLM("pocket", memory_bytes=16 * 2**20)
    with pytest.raises(InvalidRequest, match="enable_lora=True"):
        without.generate(PROMPTS, lora_request=adapters[0])
    without.close()


def test_an_adapter_whose_matrices_are_no_numbers_fails_by_name(
    llm: LLM, adapters: list[LoRARequest], tmp_path: Path
) -> None:
    write_adapter(tmp_path, read_config(pocket_folder()))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"1 of 2 prompts failed: its adapter .* not finite"):
        llm.generate(PROMPTS, GREEDY, lora_request=[LoRARequest("bad", tmp_path), adapters[0]])
    assert tokens_of(llm, PROMPTS, adapters[0])
