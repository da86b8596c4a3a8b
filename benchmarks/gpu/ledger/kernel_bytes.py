"""The kernels of a step and the bytes that each moves: of PyTorch's operations by operands, of ours by their code.

A kernel reads every byte of an operand once, and writes every byte of a result once; what a cache on the GPU keeps
between two kernels counts all the same. Where a kernel of ours reads a part of a tensor only, such as blocks that a
table names, `PARTIAL` says how much.
"""

import ast
import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from typing_extensions import override

from kernels.lora import HEAD_TILES, MODULE_WORDS, MODULES_AT, SITE_WORDS, TILE_WORDS

TO_GPU, TO_HOST = "copy to the GPU", "copy to the host"


class Launch(NamedTuple):
    """One kernel, or one copy between host and GPU, and the bytes of the GPU's memory that it reads and writes."""

    name: str
    read: int
    written: int
    operations: int = 0  # of matrix products: multiplications and additions


def touched_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements, each once where it is expanded."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(sizes) * tensor.dtype.itemsize if tensor.numel() else 0


# --- PyTorch's operations

_PRODUCTS = ("linear", "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
_FREE = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh")
_GATHERS = ("index_select", "index", "gather", "embedding", "take_along_dim")
_SCATTERS = ("index_copy_", "index_put_", "scatter_", "scatter_add_", "index_add_")
_OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "index_fill_")


def noted_operation(func: Any, args: Any, kwargs: Any, result: Any) -> list[Launch]:
    """Return the kernel of an operation; none for views, and for memory that is only allocated."""
    name = func.__name__.partition(".")[0]
    operands = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    results = [value for value in tree_flatten(result)[0] if isinstance(value, Tensor)]
    changed = [value for value in _changed(func, args, kwargs) if isinstance(value, Tensor)]
    if name in _FREE or (not changed and results and _are_views(results, operands)):
        return []
    on_host = [operand for operand in operands if operand.device.type == "cpu" and operand.dim()]
    if on_host and name == "copy_":
        return [Launch(TO_GPU, 0, results[0].nbytes)]
    own = changed or results
    written = sum(map(touched_bytes, own))
    is_overwritten = name in _OVERWRITES or func.__name__.endswith(".out")
    read_from = [one for one in operands if not (is_overwritten and any(one is other for other in changed))]
    read = sum(map(touched_bytes, read_from))
    if name in _PRODUCTS:
        return [_product(name, operands, own[0])]
    if name in _GATHERS:
        read = written + sum(map(touched_bytes, operands[1:]))
    elif name in _SCATTERS:
        read = sum(map(touched_bytes, operands[1:]))
        written = touched_bytes(operands[-1])
    return [Launch(name, read, written)] if written else []


def _product(name: str, operands: list[Tensor], result: Tensor) -> Launch:
    x, weight = operands[:2] if name not in ("addmm", "baddbmm") else operands[1:3]
    read = sum(map(touched_bytes, operands))
    if name == "_grouped_mm":
        read += _chosen_bytes(weight, len(x)) - touched_bytes(weight)
    sizes = " x ".join(map(str, weight.shape))
    return Launch(f"{name} {sizes}", read, touched_bytes(result), 2 * result.numel() * x.shape[-1])


def _chosen_bytes(weight: Tensor, num_rows: int) -> int:
    return round(touched_bytes(weight) * met_share(len(weight), num_rows))


def met_share(num_experts: int, num_choices: int) -> float:
    """Return the share of experts that are chosen at all, where each choice takes each of them as likely."""
    return 1.0 - (1.0 - 1.0 / num_experts) ** num_choices


def _changed(func: Any, args: Any, kwargs: Any) -> list[Any]:
    found: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return found


def _are_views(results: list[Tensor], operands: list[Tensor]) -> bool:
    storages = {_storage(operand) for operand in operands}
    return all(_storage(result) in storages for result in results)


def _storage(tensor: Tensor) -> int:
    inner: Tensor = getattr(tensor, "content", tensor)
    return int(inner.untyped_storage()._cdata)


# --- ours

Arguments = Mapping[str, Any]

_memory: "WeakValueDictionary[int, Tensor]" = WeakValueDictionary()  # tensors whose address was asked for


def address_of(tensor: Tensor) -> int:
    _memory[id(tensor)] = tensor
    return id(tensor)


class Roles(NamedTuple):
    """The pointers that a kernel loads from and stores to."""

    read: frozenset[str]
    written: frozenset[str]


def noted_launch(kernel: Any, grid: Any, arguments: Arguments) -> Launch:
    """Return what a launch of a Triton kernel with these arguments does.

    A tensor that was passed before stands in the place of one that is absent.
    """
    del grid
    name, roles = kernel.fn.__name__, roles_of(kernel.fn)
    tensors: dict[str, Tensor] = {}
    for key, value in arguments.items():
        if isinstance(value, Tensor) and not any(value is other for other in tensors.values()):
            tensors[key] = value
    whole = {key: touched_bytes(value) for key, value in tensors.items()}
    part = PARTIAL[name](arguments) if name in PARTIAL else {}
    changed = WRITTEN[name](arguments) if name in WRITTEN else {}
    own = {key: size for key, size in {**whole, **part}.items() if key in tensors}
    read = sum(size for key, size in own.items() if key in roles.read)
    written = sum(changed.get(key, size) for key, size in own.items() if key in roles.written)
    if name in BY_ADDRESS:
        read += BY_ADDRESS[name](arguments)
    operations = OPERATIONS[name](arguments) if name in OPERATIONS else 0
    return Launch(name, read, written, operations)


@functools.cache
def roles_of(function: Callable[..., Any]) -> Roles:
    """Return which parameters a kernel loads from and stores to, by its source: an address is a sum with a pointer."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(definition, ast.FunctionDef), "a kernel is a function"
    finder = _Pointers({argument.arg for argument in definition.args.args}, function.__globals__)
    for statement in definition.body:
        finder.visit(statement)
    return Roles(frozenset(finder.read), frozenset(finder.written))


class _Pointers(ast.NodeVisitor):
    """Follows the parameters of a kernel through assignments to the loads and stores of what they point to."""

    def __init__(self, parameters: set[str], names: Mapping[str, Any]) -> None:
        self.read: set[str] = set()
        self.written: set[str] = set()
        self._roots: dict[str, set[str]] = {parameter: {parameter} for parameter in parameters}
        self._names = names

    @override
    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        roots = self._rooted(node.value)
        for target in node.targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    self._roots[name.id] = self._roots.get(name.id, set()) | roots

    @override
    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self._roots.setdefault(node.target.id, set()).update(self._rooted(node.value))

    @override
    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        called = ast.unparse(node.func)
        if called == "tl.load":
            self.read |= self._rooted(node.args[0])
        elif called == "tl.store":
            self.written |= self._rooted(node.args[0])
        elif called.startswith("tl.atomic"):
            self.read |= self._rooted(node.args[0])
            self.written |= self._rooted(node.args[0])
        elif hasattr(self._names.get(called), "fn"):
            self._follow(self._names[called].fn, node)

    def _follow(self, function: Callable[..., Any], node: ast.Call) -> None:
        roles, names = roles_of(function), list(inspect.signature(function).parameters)
        given = [*zip(names, node.args, strict=False), *((word.arg, word.value) for word in node.keywords)]
        for name, value in given:
            if name in roles.read:
                self.read |= self._rooted(value)
            if name in roles.written:
                self.written |= self._rooted(value)

    def _rooted(self, node: ast.AST) -> set[str]:
        if isinstance(node, ast.Name):
            return self._roots.get(node.id, set())
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Attribute) and node.func.attr == "to"):
            return set()
        return set().union(*(self._rooted(child) for child in ast.iter_child_nodes(node)))


# --- kernels that read or write a part of a tensor


def _values(tensor: Tensor) -> Tensor:
    inner: Tensor = getattr(tensor, "content", tensor)
    assert not inner.is_meta, "the values of this array are not known"
    return inner


def _of_decodes(arguments: Arguments) -> dict[str, int]:
    lengths, window = _values(arguments["lengths"]).to(torch.int64), arguments["window"]
    tokens = int((lengths.clamp(max=window) if window else lengths).sum())
    blocks, block_size = arguments["blocks"], arguments["BLOCK_SIZE"]
    num_parts = int(_values(arguments["part_lasts"]).count_nonzero())
    rows = arguments["KV_HEADS"] * arguments["GROUP"]
    return {
        "blocks": 2 * tokens * arguments["SLOT_WIDTH"] * blocks.dtype.itemsize,
        "entries": int((-(-lengths // block_size)).sum()) * 4,
        **dict.fromkeys(("part_rows", "part_firsts", "part_lasts"), num_parts * 4),
        "sums": num_parts * rows * arguments["HEAD_DIM"] * 4,
        "weights": num_parts * rows * 2 * 4,
    }


def _of_merged(arguments: Arguments) -> dict[str, int]:
    num_parts = int(_values(arguments["row_parts"])[-1])
    return {
        "sums": num_parts * arguments["HEADS"] * arguments["HEAD_DIM"] * 4,
        "weights": num_parts * arguments["HEADS"] * 2 * 4,
    }


def _of_chunks(arguments: Arguments) -> dict[str, int]:
    names = ("tile_sequences", "tile_positions", "tile_counts")
    sequences, positions, counts = (_values(arguments[name]).to(torch.int64) for name in names)
    ends = torch.zeros(int(sequences.max()) + 1, dtype=torch.int64)
    ends.scatter_reduce_(0, sequences, positions + counts, "amax")
    tokens = int(ends.sum())
    blocks = arguments["blocks"]
    return {"blocks": 2 * tokens * arguments["SLOT_WIDTH"] * blocks.dtype.itemsize}


def _of_placed(arguments: Arguments) -> dict[str, int]:
    keys: Tensor = arguments["keys"]
    row_bytes = keys.shape[-1] * keys.dtype.itemsize
    return dict.fromkeys(("keys", "values"), arguments["slots"].numel() * row_bytes)


def _rotated(arguments: Arguments) -> dict[str, int]:
    heads, kv_heads = int(arguments["NUM_HEADS"]), int(arguments["KV_HEADS"])
    all_heads = heads + 2 * kv_heads
    return {"fused": touched_bytes(arguments["fused"]) // all_heads * (heads + kv_heads)}


def _of_grouped(arguments: Arguments) -> dict[str, int]:
    weights = {
        name: arguments[name] for name in ("words", "scales", "zeros") if isinstance(arguments.get(name), Tensor)
    }
    num_rows = len(arguments["x"])
    return {name: _chosen_bytes(weight, num_rows) for name, weight in weights.items() if weight.dim() == 3}


def _of_sampled(arguments: Arguments) -> dict[str, int]:
    given: Tensor = arguments["temperatures"]
    temperatures: Tensor = getattr(given, "content", given)
    share = 1.0 if temperatures.is_meta else float((temperatures > 0.0).to(torch.float32).mean())
    own = {"logits": round(touched_bytes(arguments["logits"]) * (1.0 + 2.0 * share))}
    if share:
        return own
    return own | dict.fromkeys(("top_ks", "top_ps", "min_ps", "draws", "aside", "aside_ids"), 0)


def _adapters_of(arguments: Arguments) -> list[tuple[list[int], int]]:
    tiles = _values(arguments["tiles"])[HEAD_TILES:].tolist()
    return [(_site(arguments, address), count) for address, _, count in tiles if count]


def _site(arguments: Arguments, address: int) -> list[int]:
    words: list[int] = _values(_memory[address])[arguments["site"]].tolist()
    return words


def _matrix_bytes(arguments: Arguments) -> int:
    found = {words[1]: words for words, _ in _adapters_of(arguments)}.values()
    starts = range(MODULES_AT, SITE_WORDS, MODULE_WORDS)
    columns = sum(words[at + 1] * words[at + 2] for words in found for at in starts)
    ranks = sum(words[0] for words in found)
    return 4 * (columns + ranks * int(arguments["in_width"]))


def _of_added(arguments: Arguments) -> dict[str, int]:
    return {"sums": 4 * arguments["num_runs"] * sum(words[0] * count for words, count in _adapters_of(arguments))}


PARTIAL: dict[str, Callable[[Arguments], dict[str, int]]] = {
    "_decode_parts": _of_decodes,
    "_merge_parts": _of_merged,
    "_prefill": _of_chunks,
    "_place": _of_placed,
    "_sample": _of_sampled,
    "_multiply": _of_grouped,
    "_add_adapters": _of_added,
}


# Where a kernel writes less of a tensor than it reads.
WRITTEN: dict[str, Callable[[Arguments], dict[str, int]]] = {
    "_place": _rotated,
    "_add_adapters": lambda _: {"tiles": 8 * TILE_WORDS},
}


BY_ADDRESS: dict[str, Callable[[Arguments], int]] = {"_add_adapters": _matrix_bytes}


def _decode_operations(arguments: Arguments) -> int:
    lengths, window = _values(arguments["lengths"]).to(torch.int64), arguments["window"]
    tokens = int((lengths.clamp(max=window) if window else lengths).sum())
    return 4 * tokens * _query_width(arguments)


def _chunk_operations(arguments: Arguments) -> int:
    positions, counts = (_values(arguments[name]).to(torch.int64) for name in ("tile_positions", "tile_counts"))
    pairs = int((counts * positions + counts * (counts + 1) // 2).sum())
    return 4 * pairs * _query_width(arguments)


def _query_width(arguments: Arguments) -> int:
    return int(arguments["KV_HEADS"]) * int(arguments["GROUP"]) * int(arguments["HEAD_DIM"])


def _grouped_operations(arguments: Arguments) -> int:
    x: Tensor = arguments["x"]
    return 2 * x.numel() * int(arguments["columns"])


OPERATIONS: dict[str, Callable[[Arguments], int]] = {
    "_decode_parts": _decode_operations,
    "_prefill": _chunk_operations,
    "_multiply": _grouped_operations,
}
