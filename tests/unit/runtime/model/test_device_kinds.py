"""Small models of single kinds of layers, by which a GPU is checked: each has its kind alone, and chooses nothing."""

import pytest

from alignedserve.runtime.model.device_kinds import BLOCKS, KINDS, RINGS, kinds_of
from alignedserve.runtime.model.hf_config import parse_model_config
from tests.support.models.tiny_llama import TINY_LLAMA


@pytest.mark.parametrize("name", list(KINDS))
def test_each_has_its_kind_and_nothing_that_rounding_decides(name: str) -> None:
    config = parse_model_config(dict(KINDS[name].fields))
    assert list(kinds_of(config, has_rings=name == RINGS)) == [name]
    assert config.may_have_rings or name != RINGS
    assert config.experts is None or config.experts.num_chosen == config.experts.num_experts


def test_a_llama_has_none_but_of_its_file() -> None:
    llama = parse_model_config(dict(TINY_LLAMA))
    assert kinds_of(llama) == {}
    assert kinds_of(llama, is_gguf=True) == {BLOCKS: "engine.device=cpu"}
