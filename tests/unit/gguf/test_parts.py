"""Models in several GGUF files: read as one, and refused when a part is missing, of another model, or not the first."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.errors import ModelError, ModelNotFound
from alignedserve.gguf import file as gguf_file
from alignedserve.gguf.file import GgufFile, part_names
from alignedserve.runtime.model.served_model import resolve_model
from alignedserve.text.tokenizer import Tokenizer
from tests.support.models.converted_gguf import split_in_parts
from tests.support.models.tiny_gguf import write_tiny_gguf


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", "llama", ("Q4_0", "F32"))


def test_parts_are_one_model(whole: Path) -> None:
    first, *others = split_in_parts(whole, 3)
    expected, found = GgufFile(whole), GgufFile(first)
    assert list(found.tensors) == list(expected.tensors)
    assert {tensor.path for tensor in found.tensors.values()} == {first, *others}
    for name, tensor in expected.tensors.items():
        np.testing.assert_array_equal(found.raw_rows(found.tensors[name]), expected.raw_rows(tensor))
    served = resolve_model(ModelSectionConfig(path=str(first)))
    assert served.name == "tiny"
    assert served.weight_bytes == resolve_model(ModelSectionConfig(path=str(whole))).weight_bytes
    assert Tokenizer.load(first).encode("hello") == Tokenizer.load(whole).encode("hello")


def test_a_part_that_is_missing(whole: Path) -> None:
    first, second, _ = split_in_parts(whole, 3)
    second.unlink()
    with pytest.raises(ModelNotFound, match=r"00002-of-00003\.gguf is missing: a part of the model in"):
        GgufFile(first)


def test_a_part_that_is_not_the_first(whole: Path) -> None:
    _, second, _ = split_in_parts(whole, 3)
    with pytest.raises(ModelError, match=r"is part 2 of 3 of a model; name the first, tiny-00001-of-00003\.gguf"):
        GgufFile(second)


def test_parts_of_different_models(whole: Path) -> None:
    first, second, third = split_in_parts(whole, 3)
    shutil.copy(third, second)
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf is not part 2 of 3 of the model"):
        GgufFile(first)
    shutil.copy(whole, second)
    with pytest.raises(ModelError, match="is not part 2 of 3"):
        GgufFile(first)


def test_a_tensor_in_two_parts(whole: Path) -> None:
    first, second = split_in_parts(whole, 2)
    content = second.read_bytes()
    other = next(tensor.name for tensor in GgufFile(first).tensors.values() if tensor.path == second).encode()
    same_len = next(
        tensor.name.encode()
        for tensor in GgufFile(first).tensors.values()
        if tensor.path == first and len(tensor.name) == len(other)
    )
    second.write_bytes(content.replace(other, same_len))
    with pytest.raises(ModelError, match="is in another part as well"):
        GgufFile(first)


def test_fewer_tensors_than_announced(whole: Path) -> None:
    first, *_ = split_in_parts(whole, 3)
    content = bytearray(first.read_bytes())
    place = content.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    content[place] += 1
    first.write_bytes(content)
    with pytest.raises(ModelError, match=r"tensors, where \d+ are announced"):
        GgufFile(first)


@pytest.mark.parametrize("name", ["a-00000-of-00002.gguf", "a-00003-of-00002.gguf", "a-00001-of-09999.gguf"])
def test_numbers_that_are_none(name: str) -> None:
    assert gguf_file.gguf_stem(name) == "a"
    with pytest.raises(ModelError, match="is not named as one of at most"):
        part_names(name)
