"""GGUF files, whole and hostile: every wrong length, count, offset and type is a ModelError that says what is wrong."""

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alignedserve.core.errors import ModelError, ModelNotFound
from alignedserve.gguf.file import GgufFile
from alignedserve.runtime.model.gguf.config import gguf_config
from alignedserve.text.tokenizer import Tokenizer
from tests.support.marks import many
from tests.support.models.tiny_gguf import HIDDEN, byte_level_tokens, mutated_header, write_tiny_gguf

STRING, ARRAY, UINT32, UINT64 = 8, 9, 4, 10
MODEST_BYTES = 32 << 20


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "whole.gguf", "llama", ("Q4_0", "F32"))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, value_type: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", value_type) + value


def tensor(name: str, shape: tuple[int, ...], number: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", number, offset)


def made(
    path: Path, entries: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (), body: int = 0, version: int = 3
) -> Path:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join((*entries, *tensors))
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(body))
    return path


def test_metadata_and_tensors(whole: Path) -> None:
    file = GgufFile(whole)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.embedding_length"] == HIDDEN
    assert file.metadata["tokenizer.ggml.tokens"] == byte_level_tokens()
    found = file.tensors["token_embd.weight"]
    assert (found.shape, found.type.name) == ((len(byte_level_tokens()), HIDDEN), "Q4_0")
    raw = file.raw_rows(found)
    assert raw.shape == (len(byte_level_tokens()), HIDDEN // 32 * 18)
    assert raw.tobytes() in whole.read_bytes()


def test_numbers_lists_and_odd_text(tmp_path: Path) -> None:
    entries = (
        entry("flag", 7, b"\x01"),
        entry("small", 1, b"\xff"),
        entry("double", 12, struct.pack("<d", 0.5)),
        entry("numbers", ARRAY, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
        entry("names", ARRAY, struct.pack("<IQ", STRING, 2) + text("é") + text("")),
        entry("bytes", STRING, struct.pack("<Q", 2) + b"\xffa"),
        entry("none", ARRAY, struct.pack("<IQ", STRING, 0)),
    )
    metadata: dict[str, Any] = GgufFile(made(tmp_path / "a.gguf", entries)).metadata
    assert metadata.pop("numbers").tolist() == [1, -2, 3]
    assert metadata == {"flag": True, "small": -1, "double": 0.5, "names": ["é", ""], "bytes": "\ufffda", "none": []}


HUGE = 1 << 60
HOSTILE: dict[str, tuple[tuple[bytes, ...], tuple[bytes, ...], str]] = {
    "text beyond the file": ((text("a") + struct.pack("<IQ", STRING, HUGE),), (), "a string of"),
    "long key": ((struct.pack("<Q", HUGE),), (), "a string of"),
    "list of numbers beyond the file": (
        (entry("a", ARRAY, struct.pack("<IQ", UINT64, HUGE)),),
        (),
        "bytes are needed where",
    ),
    "too many texts": ((entry("a", ARRAY, struct.pack("<IQ", STRING, HUGE)),), (), "where at most"),
    "list of lists": ((entry("a", ARRAY, struct.pack("<IQ", ARRAY, 1)),), (), "unknown type 9"),
    "unknown type of value": ((entry("a", 99, b""),), (), "unknown type 99"),
    "two entries of a name": ((entry("a", 0, b"1"), entry("a", 0, b"1")), (), "two entries named 'a'"),
    "odd alignment": ((entry("general.alignment", UINT32, struct.pack("<I", 3)),), (), "small power of two"),
    "an empty dimension": ((), (tensor("t", (4, 0)),), "has the shape"),
    "an enormous shape": ((), (tensor("t", (HUGE, HUGE, HUGE)),), "lies outside the file"),
    "a type that is not read": ((), (tensor("t", (256,), 15),), "the type Q8_K"),
    "a type that there is not": ((), (tensor("t", (256,), 77),), "the type number 77"),
    "offset beyond the file": ((), (tensor("t", (4,), 0, HUGE),), "lies outside the file"),
    "two tensors of a name": ((), (tensor("t", (4,)), tensor("t", (4,))), "two tensors named 't'"),
    "one part of several": ((entry("split.count", 2, struct.pack("<H", 3)),), (), "is part 1 of 3 of a model, but not"),
    "too many parts": ((entry("split.count", 2, struct.pack("<H", 3000)),), (), "split.count must be a number"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(case: str, tmp_path: Path) -> None:
    entries, tensors, problem = HOSTILE[case]
    path = made(tmp_path / "a.gguf", entries, tensors, body=64)
    with pytest.raises(ModelError, match=problem) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "4 bytes are needed where 0"),
        (b"GGUF", "4 bytes are needed where 0"),
        (b"PK\x03\x04" + bytes(60), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "tensors, where at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "entries of metadata, where at most"),
    ],
)
def test_foreign_files(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=problem):
        GgufFile(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        GgufFile(tmp_path / "a.gguf")


def test_file_that_shrinks_after_its_header_was_read(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(whole.read_bytes())
    file = GgufFile(path)
    with path.open("r+b") as opened:
        opened.truncate(file.tensors["output_norm.weight"].offset + 10)
    with pytest.raises(ModelError, match=r"output_norm\.weight ends after 10 of"):
        file.raw_rows(file.tensors["output_norm.weight"])


@pytest.mark.parametrize("share", np.linspace(0.0, 0.999, 12).tolist())
def test_truncated_anywhere(whole: Path, share: float, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    content = whole.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ModelError):
        GgufFile(path)


def read_everything(path: Path) -> None:
    """Read a file as `serve` does before it starts anything."""
    gguf_config(GgufFile(path))
    Tokenizer.load(path)


@pytest.mark.parametrize("count", [120, pytest.param(many(10_000), marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_mutated_files_are_read_or_refused(count: int, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", "llama", ("Q4_0",))
    header = path.read_bytes()[: min(found.offset for found in GgufFile(path).tensors.values())]
    rng = random.Random(count)
    num_refused = 0
    tracemalloc.start()
    with path.open("r+b", buffering=0) as file:
        for _ in range(count):
            file.seek(0)
            file.write(mutated_header(header, rng))
            try:
                read_everything(path)
            except ModelError:
                num_refused += 1
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < MODEST_BYTES
    assert num_refused > count // 10
