"""A GPU that only counts: tensors without content on "cuda:0", kernels that are noted and not run.

The engine runs on it as on a GPU, at any size, where PyTorch is built for CPUs alone and nothing but the shapes is
computed. Small arrays of integers that come from the host keep their values, as kernels read lengths and tables there.
"""

import contextlib
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction
from typing_extensions import override

from benchmarks.gpu.ledger.forms import GPU
from benchmarks.gpu.ledger.kernel_bytes import TO_GPU, TO_HOST, Launch, address_of, noted_launch, noted_operation

_MOST_KEPT_BYTES = 4 << 20  # of an array whose values are kept
# Of an H100: the others differ in bandwidth and in how many programs share the contexts.
_PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    shared_memory_per_multiprocessor=228 * 1024,
    shared_memory_per_block_optin=227 * 1024,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    total_memory=80 << 30,
)
# Compiled for 9.0: registers and shared memory of decode attention in bfloat16, heads of 128 (compiled_kernels.json).
_COMPILED = types.SimpleNamespace(n_regs=168, metadata=types.SimpleNamespace(num_warps=4, shared=72192))
_DENSE = torch.contiguous_format
_TO = ("to", "_to_copy")
_HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "bincount")


class CountedTensor(Tensor):
    """A tensor on the GPU, of the sizes and strides of `content`: on "meta" or, where values are kept, on the CPU."""

    content: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "CountedTensor":
        own: CountedTensor = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=GPU,
        )
        own.content = inner
        return own

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = _METHODS.get(func)
        if own is not None:
            return own(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} outside of a CountedGpu")


def _indexed(tensor: Tensor, index: Any) -> Tensor:
    places = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [place for place in places if not isinstance(place, Tensor)]:
        at = next(number for number, place in enumerate(places) if place is Ellipsis)
        missing = tensor.dim() - sum(place is not None for place in places) + 1
        places[at : at + 1] = [slice(None)] * missing
    gathered: list[Tensor | None] = []
    dim = 0
    for place in places:
        if isinstance(place, Tensor):
            gathered += [None] * (dim - len(gathered)) + [place]
            dim += 1
        elif place is None:
            tensor, dim = torch.ops.aten.unsqueeze.default(tensor, dim), dim + 1
        elif isinstance(place, slice):
            if place != slice(None):
                tensor = torch.ops.aten.slice.Tensor(tensor, dim, place.start, place.stop, place.step or 1)
            dim += 1
        else:
            tensor = torch.ops.aten.select.int(tensor, dim, int(place))
    return torch.ops.aten.index.Tensor(tensor, gathered) if gathered else tensor


def _assign(tensor: Tensor, index: Any, value: Any) -> None:
    places = index if isinstance(index, tuple) else (index,)
    if any(isinstance(place, Tensor) for place in places):
        value = value if isinstance(value, Tensor) else torch.full((), value, dtype=tensor.dtype, device=GPU)
        torch.ops.aten.index_put_.default(tensor, list(places), value)
    elif isinstance(value, Tensor):
        _indexed(tensor, index).copy_(value)
    else:
        _indexed(tensor, index).fill_(value)


_METHODS: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _indexed,
    Tensor.__setitem__: _assign,
    Tensor.copy_: lambda tensor, source, non_blocking=False: torch.ops.aten.copy_.default(tensor, source, non_blocking),
    Tensor.record_stream: lambda *_: None,
    Tensor.data_ptr: address_of,
    Tensor.contiguous: lambda tensor: tensor if tensor.is_contiguous() else tensor.clone(memory_format=_DENSE),
}


class CountedGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within its context "cuda" is this GPU. `launches`: what it was given to do, in order."""

    @classmethod
    @override
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] = []
        self.calls: list[Callable[[], Launch]] = []  # of the same launches: what each would do now
        self.num_host_reads = 0  # values that the host read from the GPU, besides those that it waited for by events

    @contextlib.contextmanager
    def used(self) -> Iterator["CountedGpu"]:
        with contextlib.ExitStack() as stack:
            for target, name, value in self._replaced():
                stack.enter_context(mock.patch.object(target, name, value))
            stack.enter_context(self)
            yield self

    def _replaced(self) -> list[tuple[Any, str, Any]]:
        launch = self._launcher()
        cuda: Any = torch.cuda
        return [
            (cuda, "_lazy_init", lambda: None),
            (cuda, "is_available", lambda: True),
            (cuda, "device_count", lambda: 1),
            (cuda, "current_device", lambda: 0),
            (cuda, "synchronize", self._read_by_host),
            (cuda, "device", lambda device: contextlib.nullcontext()),
            (cuda, "get_device_properties", lambda device=None: _PROPERTIES),
            (cuda, "get_device_capability", lambda device=None: (_PROPERTIES.major, _PROPERTIES.minor)),
            (torch, "empty", _without_pinning(torch.empty)),
            (torch, "tensor", _made_on_host(torch.tensor)),
            (Tensor, "pin_memory", lambda tensor, device=None: tensor),
            (Tensor, "is_pinned", lambda tensor, device=None: tensor.device.type == "cpu"),
            (JITFunction, "run", launch),
            (InterpretedFunction, "run", launch),
        ]

    def note(self, call: Callable[[], Launch]) -> None:
        self.launches.append(call())
        self.calls.append(call)

    def _read_by_host(self, *_: Any) -> None:
        self.num_host_reads += 1

    def _launcher(self) -> Callable[..., Any]:
        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            del warmup
            names = kernel.arg_names
            own = dict(zip(names, args, strict=False)) | {key: value for key, value in options.items() if key in names}
            self.note(partial(noted_launch, kernel, grid, own))
            return _COMPILED

        return run

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        counted = [tensor for tensor in tensors if isinstance(tensor, CountedTensor)]
        device = kwargs.get("device")
        target = None if device is None else torch.device(device).type
        if not counted and target != GPU.type:
            return func(*args, **kwargs)
        name = func.__name__.partition(".")[0]
        if name in _HOST_READS:
            self.num_host_reads += 1
        if name == "copy_" and not isinstance(args[0], CountedTensor):
            self.num_host_reads += not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            return self._copied_out(args[0], args[1])
        if name in _TO and target == "cpu":
            self.num_host_reads += 1
            return self._copied_out(torch.empty(counted[0].shape, dtype=counted[0].dtype), counted[0])
        if name in _TO and not counted:
            self.note(partial(Launch, TO_GPU, 0, tensors[0].nbytes))
            return CountedTensor(tensors[0].clone())
        if counted and name != "copy_":
            own = [tensor for tensor in tensors if tensor.dim() and not isinstance(tensor, CountedTensor)]
            assert not own, f"{name} of a tensor on the GPU and one on the host"
        result = self._computed(func, name, args, kwargs, tensors)
        for launch in noted_operation(func, args, kwargs, result):
            self.note(partial(Launch, *launch))
        return result

    def _copied_out(self, target: Tensor, source: Tensor) -> Tensor:
        self.note(partial(Launch, TO_HOST, source.nbytes, 0))
        inner = source.content if isinstance(source, CountedTensor) else source
        return target.zero_() if inner.is_meta else target.copy_(inner)

    def _computed(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        inners = [tensor.content if isinstance(tensor, CountedTensor) else tensor for tensor in tensors]
        keeps = not any(inner.is_meta for inner in inners) and name not in _HOST_READS
        if not inners:
            keeps = _is_small_array(args, kwargs)
        where = torch.device("cpu" if keeps else "meta")
        if "device" in kwargs:
            kwargs = {**kwargs, "device": where}
        kwargs.pop("pin_memory", None)
        own: dict[int, Tensor] = {}

        def inner_of(tensor: Tensor) -> Tensor:
            inner = tensor.content if isinstance(tensor, CountedTensor) else tensor
            moved = inner if keeps or inner.is_meta else inner.to("meta")
            own[id(moved)] = tensor
            return moved

        if name == "bincount":  # as if all were met equally often
            count = kwargs["minlength"] if "minlength" in kwargs else args[2]
            return CountedTensor(torch.full((count,), tensors[0].numel() // count))
        if name == "empty" and keeps:  # what a kernel would write there: a token, and that it can be used
            return CountedTensor(func(*args, **kwargs).fill_(1))
        if name == "copy_" and not keeps:  # of tensors on two devices, in PyTorch's eyes
            return args[0]
        results = func(*tree_map_only(Tensor, inner_of, args), **tree_map_only(Tensor, inner_of, kwargs))
        return tree_map_only(
            Tensor, lambda result: own[id(result)] if id(result) in own else CountedTensor(result), results
        )


def _is_small_array(args: Any, kwargs: Any) -> bool:
    dtype = kwargs.get("dtype") or torch.float32
    sizes = args[0] if args and isinstance(args[0], (list, tuple)) else ()
    num_elements = 1
    for size in sizes:
        num_elements *= int(size)
    return not dtype.is_floating_point and num_elements * dtype.itemsize <= _MOST_KEPT_BYTES


def _without_pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        del pin_memory
        return make(*args, **options)

    return made


def _made_on_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(value: Any, *, device: Any = None, **options: Any) -> Tensor:
        tensor = make(value, **options)
        return tensor if device is None else tensor.to(device)

    return made
