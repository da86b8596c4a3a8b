"""Low-rank products of adapters by the native kernels (kernels/csrc/lora); their plain form: kernels.lora."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.cpu.native import load_native

_native = load_native("LoraAdapter")


def lora_levels() -> tuple[str, ...]:
    """Return the levels, best first, that are built and run here; none without the extension."""
    return () if _native is None else tuple(_native.lora_levels())


class LoraModule(NamedTuple):
    """What an adapter adds to the results of one module of a product: scale * B (A x)."""

    first_column: int  # in a row of addends, see kernels.addends
    num_columns: int
    matrices: tuple[Tensor, Tensor] | None  # A [rank, in_width], scale * B [num_columns, rank]; None: it adds nothing


class NativeAdapter:
    """The packed matrices of one adapter."""

    def __init__(self, num_sites: int, *, level: str | None = None) -> None:
        """`num_sites`: products that it may add to. Raises ValueError for an unavailable level."""
        self.native = _native.LoraAdapter(level or lora_levels()[0], num_sites)

    def set(self, site: int, in_width: int, modules: Sequence[LoraModule]) -> None:
        """Pack the matrices of a product's modules, which fill its columns and are not kept."""
        described, kept = [], []
        for first, count, matrices in modules:
            if matrices is None:
                described.append((first, count, 0, 0, 0))
                continue
            a, b = (matrix.float().contiguous() for matrix in matrices)
            assert a.shape[1] == in_width, f"A of {tuple(a.shape)} for inputs of {in_width}"
            assert b.shape == (count, len(a)), f"B of {tuple(b.shape)} for {count} columns"
            kept += [a, b]
            described.append((first, count, len(a), a.data_ptr(), b.data_ptr()))
        self.native.set(site, in_width, described)

    @property
    def num_bytes(self) -> int:
        return int(self.native.num_bytes)


class NativeGroups:
    """Rows of a pass, grouped by adapter."""

    def __init__(self, adapters: Sequence[NativeAdapter], ends: Sequence[int], places: Sequence[int]) -> None:
        """Group i: rows places[ends[i - 1] : ends[i]] of the pass have adapters[i]."""
        self._adapters = tuple(adapters)  # which the kernels point to
        self.kernel: Any = _native.LoraGroups([adapter.native for adapter in adapters], list(ends), list(places))
        self._least_rows = max(places) + 1
        self._num_rows = len(places)

    def addends(self, site: int, x: Tensor, width: int) -> Tensor:
        assert x.ndim == 2, f"not rows: {x.shape}"
        assert len(x) >= self._least_rows, f"{len(x)} rows of a pass with {self._least_rows}"
        assert x.dtype in (torch.float32, torch.bfloat16), f"inputs are {x.dtype}"
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty((self._num_rows, width), dtype=torch.float32)
        is_bfloat16, threads = x.dtype == torch.bfloat16, torch.get_num_threads()
        self.kernel.run(site, x.data_ptr(), x.stride(0), is_bfloat16, out.data_ptr(), width, threads)
        return out
