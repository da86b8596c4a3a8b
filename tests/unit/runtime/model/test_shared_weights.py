"""Packed weights of several processes in one memory: shared where they are equal, and safe where one is written to."""

import ctypes
import mmap
import os
from pathlib import Path

import pytest
import torch

from alignedserve.runtime.model.weights import shared_weights
from alignedserve.runtime.model.weights.shared_weights import share_weights
from kernels.cpu.packed_linear import PackedLinear, packed_levels

PAGE = mmap.PAGESIZE


class Memory:
    """Whole pages that a process has packed a weight into."""

    def __init__(self, content: bytes) -> None:
        self._own = mmap.mmap(-1, -(-len(content) // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._own[: len(content)] = content
        self.whole = (ctypes.c_char * len(self._own)).from_buffer(self._own)
        self.address = ctypes.addressof(self.whole)

    @property
    def mapped_from(self) -> str:
        """Return the file of its first page; empty: it is the process's own."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            if first <= self.address < last:
                return line.split(maxsplit=5)[5] if line.count("/") else ""
        return ""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "weights.arena"


def share(monkeypatch: pytest.MonkeyPatch, path: Path, *memories: Memory) -> int:
    found = [(one.address, len(one.whole)) for one in memories]
    monkeypatch.setattr(shared_weights, "weight_memories", lambda: found)
    return share_weights(path, path.parent)


def test_equal_weights_are_one_memory(monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    first, other, same = Memory(b"a" * 3 * PAGE), Memory(b"b" * PAGE), Memory(b"a" * 3 * PAGE)
    assert share(monkeypatch, shared, first, other) == 4 * PAGE
    assert share(monkeypatch, shared, same) == 3 * PAGE
    assert shared.stat().st_size == 4 * PAGE  # nothing twice
    assert (first.mapped_from, same.mapped_from) == (str(shared), str(shared))
    assert bytes(same.whole) == b"a" * 3 * PAGE
    assert bytes(other.whole) == b"b" * PAGE


def test_what_one_writes_no_other_sees(monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    first, same = Memory(b"a" * PAGE), Memory(b"a" * PAGE)
    share(monkeypatch, shared, first)
    share(monkeypatch, shared, same)
    first.whole[0] = b"z"
    assert same.whole[0] == b"a"
    assert shared.read_bytes()[:1] == b"a"


def test_an_index_of_a_file_that_is_gone_is_not_believed(monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    share(monkeypatch, shared, Memory(b"a" * PAGE), Memory(b"b" * PAGE))
    shared.rename(shared.with_name("former"))
    later = Memory(b"b" * PAGE)
    assert share(monkeypatch, shared, later) == PAGE
    assert bytes(later.whole) == b"b" * PAGE == shared.read_bytes()


def test_without_room_weights_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    def no_room(file: int, offset: int, num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    memory = Memory(b"a" * PAGE)
    assert share(monkeypatch, shared, memory) == 0
    assert memory.mapped_from == ""
    assert bytes(memory.whole) == b"a" * PAGE
    assert shared.stat().st_size == 0


def test_a_product_computes_the_same_with_weights_that_are_shared(shared: Path) -> None:
    level = packed_levels(torch.float32, torch.device("cpu"))[0]
    weight, x = torch.randn(96, 64), torch.randn(3, 64)
    products = [PackedLinear(weight, None, level=level, element=torch.float32) for _ in range(2)]
    before = [product(x) for product in products]
    assert share_weights(shared, shared.parent) >= 2 * products[0].num_bytes
    assert [torch.equal(product(x), one) for product, one in zip(products, before, strict=True)] == [True, True]
