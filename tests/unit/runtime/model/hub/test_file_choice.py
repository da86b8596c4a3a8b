"""The choice of the files of a repository to download."""

import pytest

from alignedserve.core.errors import ModelError, ModelNotFound, UnsafeWeights, UnsupportedModel
from alignedserve.runtime.model.hub.file_choice import choose_gguf, choose_text_files, parse_hub_name, wants_gguf
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
