"""PyTorch's functions that make tensors by the name of a device, or bring them from one to another."""

from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
import torch.distributed
from torch import Tensor
from typing_extensions import override

from alignedserve.runtime.device import cuda_driver
from tests.support.fake_cuda import device_copies
from tests.support.fake_cuda.fakes import current
from tests.support.fake_cuda.nccl import ProcessGroupNCCL
from tests.support.fake_cuda.tensors import DeviceTensor, empty

_FACTORIES = (
    "zeros",
    "ones",
    "full",
    "tensor",
    "as_tensor",
    "arange",
    "rand",
    "randn",
    "randint",
    "randperm",
    "eye",
    "linspace",
)
_OF_CONSTANTS = ("zeros", "ones", "full", "arange", "eye", "linspace", "rand", "randn", "randint", "randperm")

Patch = tuple[Any, str, Any]


def all_patches() -> Iterator[Patch]:
    for name in _FACTORIES:
        yield torch, name, _factory(getattr(torch, name), is_filled=name in _OF_CONSTANTS)
    yield torch, "empty", _empty(torch.empty)
    yield torch, "Generator", _Generator
    yield cuda_driver, "libcuda", _Driver
    yield Tensor, "to", _to
    yield Tensor, "cuda", lambda self, device=None, **options: _to(self, torch.device(device or "cuda"))
    # The driver knows nothing of an address that is none, as one without elements has.
    yield (
        Tensor,
        "is_pinned",
        lambda self, device=None: self.numel() > 0 and current().memory.is_pinned(self.data_ptr()),
    )
    yield Tensor, "pin_memory", lambda self, device=None: pinned(self.shape, self.dtype).copy_(self)
    yield torch.distributed, "ProcessGroupNCCL", ProcessGroupNCCL
    yield torch.UntypedStorage, "_share_cuda_", _share
    yield torch.UntypedStorage, "_new_shared_cuda", staticmethod(_map)


class _Driver:
    """The driver's library, with what it does on a machine's streams."""

    cuMemcpyBatchAsync_v2 = staticmethod(device_copies.copy_batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(current().driver.library, name)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Driver)

    @override
    def __hash__(self) -> int:
        return hash(_Driver)


class _Generator(torch.Generator):
    """One of the host, for every device."""

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


def pinned(size: Any, dtype: torch.dtype) -> Tensor:
    """Allocate page-locked memory."""
    shape = torch.Size(size)
    num_bytes = shape.numel() * dtype.itemsize
    return current().memory.pinned(num_bytes)[:num_bytes].view(dtype).view(shape)


def _is_gpu(device: Any) -> TypeGuard[Any]:
    return device is not None and not isinstance(device, int) and torch.device(device).type == "cuda"


def _empty(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*size: Any, **options: Any) -> Tensor:
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        if _is_gpu(options.get("device")):
            if options.get("pin_memory"):
                raise RuntimeError("Only dense CPU tensors can be pinned")
            return empty(shape, dtype=options.get("dtype"), device=torch.device(options["device"]))
        if options.pop("pin_memory", False):
            return pinned(shape, options.get("dtype") or torch.get_default_dtype())
        return make(*size, **options)

    return made


def _factory(make: Callable[..., Tensor], *, is_filled: bool) -> Callable[..., Tensor]:
    """`is_filled`: by a kernel, of constants; otherwise with values of the host."""

    def made(*args: Any, **options: Any) -> Tensor:
        device = options.get("device")
        if not _is_gpu(device):
            if options.pop("pin_memory", False):
                own = make(*args, **options)
                return pinned(own.shape, own.dtype).copy_(own)
            return make(*args, **options)
        if args and isinstance(args[0], DeviceTensor):
            return _to(args[0], torch.device(device))
        own, there = make(*args, **options | {"device": "cpu"}), torch.device(device)
        if not is_filled:
            return device_copies.upload(own, there)
        target = empty(own.shape, dtype=own.dtype, device=there)
        alias = current().alias(target)
        current().enqueue("fill", lambda: alias.copy_(own), (), (target,))
        return target

    return made


def _to(self: Tensor, *args: Any, **options: Any) -> Tensor:
    if isinstance(self, DeviceTensor):
        return self.to(*args, **options)
    if args and isinstance(args[0], DeviceTensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    parsed = {name: value for name, value in options.items() if name != "copy"}  # to a GPU always
    device, dtype, is_non_blocking, _ = torch._C._nn._parse_to(*args, **parsed)
    if not _is_gpu(device):
        return torch._C.TensorBase.to(self, *args, **options)
    return device_copies.upload(self, device, non_blocking=is_non_blocking, dtype=dtype)


def _share(self: Any) -> tuple[Any, ...]:
    """Share a device's memory: the handle is its address, which this process alone understands."""
    arena = current().memory.arena_of(self.data_ptr())
    assert arena is not None, "memory of no device"
    handle = b"fake %d" % self.data_ptr()
    return 0, handle, self.nbytes(), 0, b"counter", 0, b"event", True


def _map(device: int, handle: bytes, size: int, *others: Any) -> Any:
    memory, address = current().memory, int(handle.split()[1])
    holder = memory.holder(address)
    if holder is None:
        raise RuntimeError("CUDA error: invalid device context: the memory is gone")
    current().num_mapped += 1
    return torch.from_numpy(holder)[:size].untyped_storage()
