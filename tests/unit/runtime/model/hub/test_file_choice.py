"""The choice of the files of a repository to download."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.errors import ConfigError, ModelError, ModelNotFound, UnsafeWeights, UnsupportedModel
from alignedserve.runtime.model import named_models as built_in
from alignedserve.runtime.model.hub.file_choice import (
    HubName,
    choose_gguf,
    choose_text_files,
    names_hub_model,
    parse_hub_name,
    wants_gguf,
)
from alignedserve.runtime.model.hub.local_models import with_local_model
from alignedserve.runtime.model.named_models import SHORT_NAMES, full_name
from tests.support.marks import each

PLAIN = parse_hub_name("org/model")
TEXT = ["config.json", "tokenizer.json"]


@each(
    ("listed", "error", "message"),
    [
        ([*TEXT, "pytorch_model.bin"], UnsafeWeights, r"only as pytorch_model\.bin, a pickle format"),
        ([*TEXT, "weights/consolidated.00.pth"], UnsafeWeights, r"consolidated\.00\.pth"),
        ([*TEXT, "tf_model.h5"], ModelNotFound, r"neither model\.safetensors nor .*; it has .*tf_model\.h5"),
        ([], ModelNotFound, r"neither model\.safetensors"),
        (["config.json", "model.safetensors", "tokenizer.model"], UnsupportedModel, r"no tokenizer\.json"),
        (["tokenizer.json", "model.safetensors.index.json"], UnsupportedModel, r"no config\.json"),
    ],
)
def test_what_cannot_be_served(listed: list[str], error: type[ModelError], message: str) -> None:
    with pytest.raises(error, match=message):
        choose_text_files(PLAIN, listed)


GGUF = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-q8_0.gguf", "m.f16.gguf", "mmproj-m-F16.gguf", "big/m-Q6_K.gguf"]


@pytest.mark.parametrize(
    ("quantization", "file"),
    [
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q4_k_s", "m-Q4_K_S.gguf"),
        ("Q8_0", "m-q8_0.gguf"),
        ("F16", "m.f16.gguf"),
        ("m.f16.gguf", "m.f16.gguf"),
    ],
)
def test_one_quantisation(quantization: str, file: str) -> None:
    name = parse_hub_name(f"org/model:{quantization}")
    assert wants_gguf(name, [*GGUF, *TEXT, "model.safetensors"])
    assert choose_gguf(name, [*GGUF, *TEXT]) == [file]


def test_without_safetensors_the_usual_quantisation_or_the_only_one() -> None:
    assert wants_gguf(PLAIN, GGUF)
    assert choose_gguf(PLAIN, GGUF) == ["m-Q4_K_M.gguf"]
    assert choose_gguf(PLAIN, ["m.Q5_1.gguf"]) == ["m.Q5_1.gguf"]
    with pytest.raises(ModelNotFound, match=r"has several .* org/model:m\.Q5_1\.gguf: m\.Q5_1\.gguf, m\.Q6_K\.gguf"):
        choose_gguf(PLAIN, ["m.Q5_1.gguf", "m.Q6_K.gguf"])


@pytest.mark.parametrize("quantization", ["Q4_K", "Q2_K", "Q6_K", "mmproj"])
def test_a_quantisation_that_is_not_there(quantization: str) -> None:
    with pytest.raises(ModelNotFound, match=r"is not there; org/model has m-Q4_K_M\.gguf, m-Q4_K_S\.gguf, m-q8"):
        choose_gguf(parse_hub_name(f"org/model:{quantization}"), GGUF)


@pytest.mark.parametrize("folder", ["", "Q8_0/"])
def test_all_parts_of_a_split_model(folder: str) -> None:
    parts = [f"{folder}m-Q8_0-{part:05}-of-00003.gguf" for part in (1, 2, 3)]
    name = parse_hub_name("org/model:Q8_0")
    assert choose_gguf(name, ["m-Q6_K.gguf", *reversed(parts), "other/m-Q8_0.gguf"]) == parts
    assert choose_gguf(parse_hub_name("org/model:m-Q8_0-00001-of-00003.gguf"), parts) == parts
    with pytest.raises(ModelNotFound, match=r"has no .*00002-of-00003\.gguf, a part of the model in"):
        choose_gguf(name, [parts[0], parts[2]])
    with pytest.raises(ModelNotFound, match="is not there; org/model has no GGUF file"):
        choose_gguf(name, parts[1:])


def test_parts_of_an_impossible_number_are_not_asked_for() -> None:
    with pytest.raises(ModelError, match="is not named as one of at most"):
        choose_gguf(PLAIN, ["m-00001-of-99999.gguf"])


@each(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("a/b@main", HubName("a/b", "main")),
        ("a/b@refs/pr/1", HubName("a/b", "refs/pr/1")),
        ("a/b:Q4_K_M", HubName("a/b", None, "Q4_K_M")),
        ("a/b:Q4_K_M@v1.0", HubName("a/b", "v1.0", "Q4_K_M")),
        ("a/b@v1.0:model-Q8_0.gguf", HubName("a/b", "v1.0", "model-Q8_0.gguf")),
    ],
)
def test_parts_of_a_name(text: str, name: HubName) -> None:
    assert parse_hub_name(text) == name
    assert parse_hub_name(str(name)) == name


@each(
    "text",
    [
        "pocket",
        "",
        "/a/b",
        "../b",
        "a/b/c",
        "a/b@",
        "a/b@../../x",
        "a/b c",
        "a/..b",
        "a/" + "b" * 100,
        "a/b\0",
        "https://huggingface.co/a/b",
    ],
)
def test_what_is_no_name_on_a_hub(text: str) -> None:
    with pytest.raises(ConfigError, match=r"ORG/NAME\[:QUANTISATION\]\[@REVISION\]"):
        parse_hub_name(text)
    assert not names_hub_model(text)


def test_what_is_here_goes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert names_hub_model("models/tiny")
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    assert not names_hub_model("models/tiny")
    assert not names_hub_model("models/absent.gguf")
    assert names_hub_model("models/absent:file.gguf")


@given(st.text("ab/:@.-_ \n", max_size=12))
def test_any_text_is_a_name_that_prints_as_itself_or_refused(text: str) -> None:
    try:
        name = parse_hub_name(text)
    except ConfigError:
        return
    assert parse_hub_name(str(name)) == name


class _Hub:
    """Fetches nothing, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def fetch(self, name: object, report: object, *, has_weights: bool) -> Path:
        self.asked.append(str(name))
        return Path("/cache/model.gguf")


def test_every_short_name_is_one_of_a_hub() -> None:
    assert [str(parse_hub_name(full)) for full in SHORT_NAMES.values()] == list(SHORT_NAMES.values())


def test_a_short_name_is_fetched_and_is_what_clients_call_the_model() -> None:
    hub = _Hub()
    local = with_local_model(ModelSectionConfig(path="qwen3"), hub=hub)  # type: ignore[arg-type]
    assert (local.path, local.served_model_name) == ("/cache/model.gguf", "qwen3")
    named = with_local_model(ModelSectionConfig(path="qwen3", served_model_name="chat"), hub=hub)  # type: ignore[arg-type]
    assert named.served_model_name == "chat"
    assert hub.asked == ["Qwen/Qwen3-0.6B-GGUF:Q8_0"] * 2


def test_a_folder_goes_before_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3").mkdir()
    assert full_name("qwen3") == "qwen3"
    assert full_name("a/b") == "a/b"
    monkeypatch.setattr(built_in, "_PACKAGE", "no_such_package_of_a_test")
    assert full_name("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    monkeypatch.setattr("alignedserve.runtime.model.named_models.smollm2_file", lambda: tmp_path)
    assert full_name("smollm2") == "smollm2"
