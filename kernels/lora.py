"""What LoRA adapters add to products: scale * B (A x), for rows of a pass that have different adapters.

Rows are grouped by adapter, so that every matrix is read once for all its rows (Punica's SGMV). The sums of a row are
in one order, whatever rows are computed beside it. Three ways: native kernels on a CPU (`kernels.cpu.lora`), kernels on
a GPU (`kernels.lora`), and plain PyTorch.

The rows of a pass that have adapters, as kernels on a GPU take them: arrays that come with those of the pass.

Up to GRAPH_ROWS rows their sizes depend on the number of rows alone, so that a recorded pass is replayed with others.

Kernels find the matrices of adapters by tables of addresses. An adapter has one table in the device's memory, int64
[sites, SITE_WORDS]:

    ranks        of all modules of the product, one after another; 0: the adapter adds nothing
    A            address, float32 [ranks, in_width]
    3 modules    each its first column in the product, its columns (0: absent), its ranks, the first of them,
                 and the address of scale * B, float32 [columns, ranks]

A tile is int64 [TILE_WORDS]: the address of a table, the first of its rows among the sorted ones, their number. Before
the tiles of a pass are two of other words: how many have rows, and the most ranks of a product; then the queue of a
launch, zeros before and after it: items of work that were taken, products with A that are done, programs that are."""

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.addend_layout import LayerProduct, ProductShape, site_of, up_column
from kernels.addends import Addends
from kernels.cpu.decode_pass import PassAdapters
from kernels.cpu.lora import LoraModule, NativeAdapter, NativeGroups, lora_levels
from kernels.gpu_dispatch import fused_kernels
from kernels.linear import AdaptableProjection

MOST_MODULES = 3  # of a product: queries, keys, values
MODULES_AT, MODULE_WORDS = 2, 5
SITE_WORDS = MODULES_AT + MOST_MODULES * MODULE_WORDS
TILE_WORDS, HEAD_TILES = 3, 2

IntArray = npt.NDArray[np.int64]


class AdapterTable:
    """The matrices of one adapter on a device, and where they lie."""

    def __init__(self, num_sites: int, device: torch.device) -> None:
        self._words = np.zeros((num_sites, SITE_WORDS), np.int64)
        self._device = device
        self._kept: list[Tensor] = []  # what the addresses point to
        self._table: Tensor | None = None
        self.num_ranks = 0  # of any product, at most
        self.num_bytes = 0

    def set(self, site: int, shape: ProductShape, modules: Sequence[LoraModule]) -> None:
        assert self._table is None, "the table is in use"
        present = [(module, module.matrices) for module in modules if module.matrices is not None]
        assert len(present) <= MOST_MODULES, f"{len(present)} modules of one product"
        if not present:
            return
        stacked = self._moved(torch.cat([a.float() for _, (a, _) in present]))
        words, rank = [len(stacked), stacked.data_ptr()], 0
        for module, (a, b) in present:
            words += [_column(module, shape), module.num_columns, len(a), rank, self._moved(b.float()).data_ptr()]
            rank += len(a)
        self._words[site, : len(words)] = words
        self.num_ranks = max(self.num_ranks, rank)

    @property
    def address(self) -> int:
        if self._table is None:
            self._table = torch.from_numpy(self._words).to(self._device, copy=True)
        return self._table.data_ptr()

    def _moved(self, matrix: Tensor) -> Tensor:
        moved = matrix.contiguous().to(self._device, copy=True)
        self._kept.append(moved)
        self.num_bytes += moved.nbytes
        return moved


def _column(module: LoraModule, shape: ProductShape) -> int:
    first_up = up_column(shape.out_width)
    is_up = shape.is_gated and module.first_column >= first_up
    return module.first_column - first_up + shape.out_width if is_up else module.first_column


def num_tiles(counts: Sequence[int], tile_rows: int) -> int:
    return sum(-(-count // tile_rows) for count in counts)


def cut_tiles(addresses: Sequence[int], ends: Sequence[int], tile_rows: int, count: int, most_ranks: int) -> IntArray:
    """Cut sorted rows into `count` tiles, behind their head; the last ones may have no rows. Group i: the adapter at
    addresses[i], rows [ends[i - 1], ends[i])."""
    tiles = np.zeros((HEAD_TILES + count, TILE_WORDS), np.int64)
    at = HEAD_TILES
    for address, (first, last) in zip(addresses, pairwise([0, *ends]), strict=True):
        for begin in range(first, last, tile_rows):
            tiles[at] = address, begin, min(tile_rows, last - begin)
            at += 1
    tiles[0, :2] = at - HEAD_TILES, most_ranks
    return tiles


GRAPH_ROWS = 512
_SMALL_TILE, _LARGE_TILE = 16, 64  # rows: of decodes, of prompts
_GRAPH_ADAPTERS = 32  # a recorded pass has so many tiles beside those that its rows fill
_GRAPH_RANKS = 192  # of a product: three modules of rank 64
_RANKS = 16  # see kernels.gpu.lora
_NO_ROWS = np.empty(0, np.int64)


def device_kernels(dtype: torch.dtype, device: torch.device) -> Any | None:
    """Return the module that multiplies inputs of this dtype on a device; None: it has no such kernels."""
    return fused_kernels("lora", device, dtype)


class DevicePlan:
    """The arrays of one pass, on the host."""

    def __init__(
        self,
        kernels: Any,
        num_rows: int,
        tables: Sequence[AdapterTable] = (),
        ends: Sequence[int] = (),
        places: IntArray = _NO_ROWS,
    ) -> None:
        """Group i: rows places[ends[i - 1] : ends[i]] of a pass of `num_rows` have tables[i]; maybe there is none.

        `kernels`: see device_kernels."""
        self._kernels = kernels
        self._tile_rows = _SMALL_TILE if num_rows <= GRAPH_ROWS else _LARGE_TILE
        counts = np.diff([0, *ends]).tolist()
        needed = num_tiles(counts, self._tile_rows)
        own_ranks = max((table.num_ranks for table in tables), default=0)
        recorded = min(num_rows, num_rows // _SMALL_TILE + _GRAPH_ADAPTERS)
        # Whether a recorded pass of as many rows may read them.
        self.is_of_a_graph = num_rows <= GRAPH_ROWS and needed <= recorded and own_ranks <= _GRAPH_RANKS
        self._num_ranks = _GRAPH_RANKS if self.is_of_a_graph else max(-(-own_ranks // _RANKS), 1) * _RANKS
        padded = np.zeros(num_rows, np.int64)
        padded[: len(places)] = places
        addresses = [table.address for table in tables]
        count = recorded if self.is_of_a_graph else needed
        tiles = cut_tiles(addresses, ends, self._tile_rows, count, own_ranks)
        self.host_arrays = (padded, tiles)

    def bound(self, tensors: Sequence[Tensor]) -> "DeviceRows":
        """Return the rows. `tensors`: the host arrays on the device, flat or not."""
        places, tiles = tensors
        tiles = tiles.view(self.host_arrays[1].shape)
        return DeviceRows(self._kernels.RowTiles(places, tiles, self._tile_rows, self._num_ranks), self._kernels)


class DeviceRows(NamedTuple):
    """The rows of one pass that have an adapter."""

    rows: Any  # RowTiles of kernels.gpu.lora
    kernels: Any

    def product(self, site: int, multiply: AdaptableProjection, x: Tensor) -> Tensor:
        """Multiply x [rows, in_width] of the whole pass, with what the adapters add to this product."""
        return multiply(x, Addends.by_device(lambda product: self.kernels.add_adapters(product, x, site, self.rows)))

    def part(self, first: int, last: int) -> "DeviceRows":
        """Return the rows of a part of the pass, which is all of it: on a device nothing is cut."""
        assert first == 0, f"rows from {first} on"
        assert last == len(self.rows.places), f"{last} rows of {len(self.rows.places)}"
        return self


PLAIN = "torch"  # PyTorch's own products


class AdapterMatrices:
    """The matrices of one adapter, packed for the native kernels or as PyTorch multiplies them."""

    def __init__(
        self, shapes: Sequence[ProductShape], num_layers: int, dtype: torch.dtype, device: torch.device, level: str = ""
    ) -> None:
        """`shapes` of a layer's products, in the order of LayerProduct. `dtype` of their inputs. `level`: one of
        `lora_levels`, or PLAIN; empty: the best."""
        is_taken = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
        self.shapes = tuple(shapes)
        self.device_kernels = None if level else device_kernels(dtype, device)
        has_native = level != PLAIN and is_taken and bool(lora_levels()) and self.device_kernels is None
        num_sites = num_layers * len(self.shapes)
        self.has_site = [False] * num_sites  # whether it adds anything to the product
        self.native = NativeAdapter(num_sites, level=level or None) if has_native else None
        self.table = None if self.device_kernels is None else AdapterTable(num_sites, device)
        self.num_bytes = 0
        self._device = device
        self._sites: list[tuple[LoraModule, ...]] = [()] * num_sites

    def set(self, site: int, modules: Sequence[LoraModule]) -> None:
        """Take the matrices of the modules of one product, in the order of their columns; those without are among
        them, so that together they fill a row of addends."""
        self.has_site[site] = True
        if self.table is not None:
            self.table.set(site, self.shapes[site % len(self.shapes)], modules)
            self.num_bytes = self.table.num_bytes
            return
        if self.native is not None:
            self.native.set(site, self.shapes[site % len(self.shapes)].in_width, modules)
            self.num_bytes = self.native.num_bytes
            return
        moved = [module._replace(matrices=self._moved(module.matrices)) for module in modules]
        self._sites[site] = tuple(moved)
        self.num_bytes += sum(matrix.nbytes for module in moved for matrix in module.matrices or ())

    def add_products(self, site: int, x: Tensor, out: Tensor) -> None:
        """Add to out [rows, width] float32 the addends of x [rows, in_width]; not where they are native."""
        for first, count, matrices in self._sites[site]:
            if matrices is not None:
                a, b = matrices
                out[:, first : first + count] += x.float() @ a.T @ b.T

    def _moved(self, matrices: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
        if matrices is None:
            return None
        a, b = (matrix.to(self._device, torch.float32).contiguous() for matrix in matrices)
        return a, b


class AdapterRows:
    """The rows of one pass that have an adapter."""

    def __init__(self, adapters: Sequence[AdapterMatrices], of_row: IntArray, device: torch.device) -> None:
        """`of_row` [rows]: index of each row's adapter, or -1; one row at least has one."""
        order = np.argsort(of_row, kind="stable")
        self._adapters, self._indices, self._device = adapters, of_row, device
        places = order[np.searchsorted(of_row[order], 0) :]
        used, counts = np.unique(of_row[places], return_counts=True)
        self._ends = np.cumsum(counts).tolist()
        self._used = [adapters[index] for index in used.tolist()]
        self._num_rows = len(places)
        inverse = np.full(len(of_row), -1, np.int64)
        inverse[places] = np.arange(len(places))
        self._of_row = torch.from_numpy(inverse)
        self._plan = self._device_plan(places)
        self._on_device: DeviceRows | None = None
        self._places = torch.from_numpy(places)
        if self._plan is None:
            self._places = self._places.to(device)
        self._parts: dict[tuple[int, int], AdapterRows | None] = {}
        self._with: dict[tuple[bool, ...], AdapterRows | None] = {}
        self._pass_adapters: PassAdapters | None = None
        self._native = None
        native = [adapter.native for adapter in self._used if adapter.native is not None]
        if native:
            self._native = NativeGroups(native, self._ends, places.tolist())

    def are(self, adapters: Sequence[AdapterMatrices], of_row: IntArray) -> bool:
        """Return whether these are the rows of such a pass."""
        is_same = len(adapters) == len(self._adapters) and all(map(operator.is_, adapters, self._adapters))
        return is_same and np.array_equal(of_row, self._indices)

    def part(self, first: int, last: int) -> "AdapterRows | None":
        """Return the same for the rows [first, last) of the pass; None: none of them has an adapter."""
        if (first, last) not in self._parts:
            self._parts[first, last] = self.selected(np.arange(first, last))
        return self._parts[first, last]

    def selected(self, rows: IntArray) -> "AdapterRows | None":
        """Return the same for a pass that goes on with these rows alone; None: none of them has an adapter."""
        of_row = self._indices[rows]
        return self._of(of_row)

    @property
    def host_arrays(self) -> tuple[IntArray, ...]:
        """Return the arrays that kernels on a device read; none: there are no such kernels."""
        return () if self._plan is None else self._plan.host_arrays

    @property
    def is_of_a_graph(self) -> bool:
        """Return whether a recorded pass of as many rows may read the arrays."""
        return self._plan is not None and self._plan.is_of_a_graph

    def bound(self, tensors: Sequence[Tensor]) -> "AdapterRows | DeviceRows":
        """Return the same with its arrays on the device."""
        if self._plan is None:
            return self
        return self._plan.bound(tensors)

    def product(self, site: int, multiply: AdaptableProjection, x: Tensor) -> Tensor:
        """Multiply x [rows, in_width], rows as in `of_row`, with what the adapters add to this product."""
        if self._plan is not None:  # of a part of a pass: its arrays did not come with those of the whole
            if self._on_device is None:
                self._on_device = self._plan.bound(
                    [torch.from_numpy(host_array).to(x.device) for host_array in self.host_arrays]
                )
            return self._on_device.product(site, multiply, x)
        entry = self._at(site)
        return multiply(x) if entry is None else multiply(x, entry.addends(site, x))

    def addends(self, site: int, x: Tensor) -> Addends:
        """Compute what is added to a product of x [rows, in_width], rows as in `of_row`; every adapter adds to it."""
        width = self._used[0].shapes[site % len(self._used[0].shapes)].addend_width
        if self._native is not None:
            return Addends(self._native.addends(site, x, width), self._places, self._of_row)
        values = torch.zeros((self._num_rows, width), dtype=torch.float32, device=self._device)
        grouped = x.index_select(0, self._places)
        for adapter, (first, last) in zip(self._used, pairwise([0, *self._ends]), strict=True):
            adapter.add_products(site, grouped[first:last], values[first:last])
        return Addends(values, self._places, self._of_row)

    @property
    def is_native(self) -> bool:
        """Return whether `pass_adapters` has them."""
        return self._native is not None

    @property
    def pass_adapters(self) -> PassAdapters:
        """Return the same for a pass through all layers in one call."""
        if self._pass_adapters is None:
            self._pass_adapters = self._make_pass_adapters()
        return self._pass_adapters

    def _make_pass_adapters(self) -> PassAdapters:
        first = self._used[0]
        by_identity: dict[int, int] = {}  # of rows: their index
        groups: list[NativeGroups] = []
        of_rows, at_site = [], []
        for site in range(len(first.has_site)):
            entry = self._at(site)
            if entry is None:
                at_site.append(-1)
                continue
            assert entry._native is not None, "see is_native"
            if id(entry) not in by_identity:
                by_identity[id(entry)] = len(groups)
                groups.append(entry._native)
                of_rows.append(entry._of_row)
            at_site.append(by_identity[id(entry)])
        return PassAdapters(tuple(groups), tuple(of_rows), at_site, [shape.addend_width for shape in first.shapes])

    def _device_plan(self, places: IntArray) -> DevicePlan | None:
        kernels = self._used[0].device_kernels
        tables = [adapter.table for adapter in self._used if adapter.table is not None]
        return None if kernels is None else DevicePlan(kernels, len(self._indices), tables, self._ends, places)

    def _at(self, site: int) -> "AdapterRows | None":
        has_site = tuple(adapter.has_site[site] for adapter in self._used)
        if all(has_site):
            return self
        if has_site not in self._with:
            self._with[has_site] = self._without(
                [slot for slot, has in zip(self._used, has_site, strict=True) if not has]
            )
        return self._with[has_site]

    def _without(self, others: Sequence[AdapterMatrices]) -> "AdapterRows | None":
        unwanted = [index for index, adapter in enumerate(self._adapters) if adapter in others]
        of_row = np.where(np.isin(self._indices, unwanted), -1, self._indices)
        return self._of(of_row)

    def _of(self, of_row: IntArray) -> "AdapterRows | None":
        return AdapterRows(self._adapters, of_row, self._device) if (of_row >= 0).any() else None


class LayerAdapters(NamedTuple):
    """The adapters of one pass, on one layer."""

    rows: AdapterRows | DeviceRows
    layer: int

    def product(self, product: LayerProduct, multiply: AdaptableProjection, x: Tensor) -> Tensor:
        """Multiply x [rows, in_width] with what the adapters add."""
        return self.rows.product(site_of(self.layer, product), multiply, x)

    def part(self, first: int, last: int) -> "LayerAdapters | None":
        """Return the same for the rows [first, last) of the pass; None: none of them has an adapter."""
        rows = self.rows.part(first, last)
        return None if rows is None else LayerAdapters(rows, self.layer)
