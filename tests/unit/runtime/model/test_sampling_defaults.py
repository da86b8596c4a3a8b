"""How a model's makers want it to be sampled: from its files, a table of families, the configuration."""

import json
from pathlib import Path
from typing import Any

import pytest

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.errors import ConfigError
from alignedserve.gguf.file import GgufFile
from alignedserve.runtime.model.named_models import pocket_folder
from alignedserve.runtime.model.sampling_defaults import SamplingDefaults, sampling_defaults
from tests.support.marks import each

SMOLLM2 = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def _folder(path: Path, generation: dict[str, Any] | None, template: str = "") -> Path:
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def _gguf(**metadata: Any) -> GgufFile:
    found = {key.replace("__", "."): value for key, value in metadata.items()}
    file = GgufFile.__new__(GgufFile)  # with metadata alone
    file.path, file.metadata = Path("model.gguf"), found
    return file


@each(
    ("generation", "expected"),
    [
        (None, {}),
        ({"eos_token_id": 2}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
        ({"temperature": None, "top_k": -1, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"temperature": 7, "top_p": 0.8}, {"top_p": 0.8}),  # out of range, left out
        ({"temperature": True, "top_p": "0.8", "min_p": [1]}, {}),
    ],
)  # fmt: skip
def test_a_folder_says_it_in_its_generation_config(
    tmp_path: Path, generation: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    found = sampling_defaults("auto", _folder(tmp_path, generation))
    assert found.values == {**SamplingDefaults().values, **expected}
    assert found.source == ("generation_config.json" if expected else "")


def test_a_gguf_file_says_it_in_its_metadata() -> None:
    found = sampling_defaults("auto", _gguf(general__sampling__temp=0.6000000238, general__sampling__top_k=20))
    assert found == SamplingDefaults(0.6, top_k=20, source="model.gguf")
    assert found.in_words() == "temperature 0.6, top_k 20 (model.gguf)"


def test_a_family_is_known_by_its_template(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {"eos_token_id": 2}, SMOLLM2)
    for found in (
        sampling_defaults("auto", folder),
        sampling_defaults("auto", _gguf(tokenizer__chat_template=SMOLLM2)),
    ):
        assert (found.temperature, found.top_p) == (0.2, 0.9)
        assert "https://huggingface.co/HuggingFaceTB" in found.source
    own = sampling_defaults("auto", _folder(tmp_path, {"temperature": 0.9}, SMOLLM2))
    assert own.values == {**SamplingDefaults().values, "temperature": 0.9}  # the files' own word counts


def test_the_configuration_wins(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {"temperature": 0.6, "top_k": 20})
    assert sampling_defaults("none", folder) == SamplingDefaults()
    found = sampling_defaults({"temperature": 1.5, "top_k": -1}, folder)
    assert (found.temperature, found.top_k) == (1.5, 0)
    assert found.source == "model.sampling, and generation_config.json"
    with pytest.raises(ConfigError, match=r"model\.sampling: top_p must be above 0"):
        sampling_defaults({"top_p": 0}, folder)
    for wrong in ("maybe", {"heat": 1.0}):
        with pytest.raises(ConfigError, match=r"model\.sampling"):
            ModelSectionConfig(sampling=wrong)


def test_the_pocket_model_answers_alike_every_time() -> None:
    assert sampling_defaults("auto", pocket_folder()) == SamplingDefaults(0.0, source="generation_config.json")
