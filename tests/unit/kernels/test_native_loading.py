"""One OpenMP serves the kernels and PyTorch: the system's, or PyTorch's own where a system has none."""

import ctypes
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernels.cpu import native

_MESSAGE = "libgomp.so.1: cannot open shared object file: No such file or directory"


class Loads:
    """Imports that fail until a library is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, message: str) -> None:
        self.loaded: list[str] = []
        self._message = message
        monkeypatch.setattr(importlib, "import_module", self._import)
        monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: self.loaded.append(path))

    def _import(self, name: str) -> Any:
        assert name == "kernels._native"
        if not self.loaded:
            raise ImportError(self._message)
        return SimpleNamespace(kernel=1)


def torch_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyTorch be found in a folder, without loading it."""
    spec = SimpleNamespace(origin=str(folder / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "torch" else None)


def test_openmp_of_torch_serves_a_system_without_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libgomp.so.1").touch()
    torch_in(tmp_path, monkeypatch)
    loads = Loads(monkeypatch, _MESSAGE)
    assert native.load_native("kernel") is not None
    assert loads.loaded == [str(tmp_path / "lib/libgomp.so.1")]


def test_without_any_openmp_plain_torch_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch_in(tmp_path, monkeypatch)
    loads = Loads(monkeypatch, _MESSAGE)
    assert native.load_native("kernel") is None
    assert loads.loaded == []


def test_kernels_that_are_not_built_load_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libgomp.so.1").touch()
    torch_in(tmp_path, monkeypatch)
    loads = Loads(monkeypatch, "No module named 'kernels._native'")
    assert native.load_native("kernel") is None
    assert loads.loaded == []
