"""Tensors of the fake CUDA: they say that they are on a GPU, lie in the fake's memory, and every operation on them is a
step of the current stream.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tests.support.fake_cuda.fakes import current


class DeviceTensor(Tensor):
    """Memory on a GPU."""

    raw: Tensor  # the same memory, as a plain tensor
    on: torch.device

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(raw: Tensor, device: torch.device) -> "DeviceTensor":
        tensor: DeviceTensor = torch.Tensor._make_subclass(DeviceTensor, raw)
        tensor.raw = raw
        tensor.on = device
        return tensor

    @property
    @override
    def device(self) -> torch.device:  # type: ignore[override]
        return self.on

    @property
    @override
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    @override
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @override
    def get_device(self) -> int:
        return int(self.on.index)

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.on})"

    @override
    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        parsed = {name: value for name, value in kwargs.items() if name != "copy"}
        device, dtype, is_non_blocking, _ = torch._C._nn._parse_to(*args, **parsed)
        converted: Tensor = self if dtype in (None, self.dtype) else torch._C.TensorBase.to(self, dtype)
        if device is None or (device.type == "cuda" and device.index in (None, self.on.index)):
            return converted.clone() if kwargs.get("copy") and converted is self else converted
        if device.type == "cuda":
            other = empty(self.shape, dtype=converted.dtype, device=device)
            return other.copy_(converted, non_blocking=is_non_blocking)
        target = torch.empty(self.shape, dtype=converted.dtype, pin_memory=is_non_blocking)
        return target.copy_(converted, non_blocking=is_non_blocking)

    @override
    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.to("cpu")

    @override
    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        return self

    @override
    def tolist(self) -> Any:
        return self.cpu().tolist()

    @override
    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {self.on} device type tensor to numpy. Use Tensor.cpu() first")

    @override
    def is_pinned(self, device: Any = None) -> bool:
        return False

    @override
    def record_stream(self, stream: Any) -> None:
        current().memory.record_stream(self.raw.data_ptr(), stream.queue)

    @override
    def set_(self, source: Any) -> "DeviceTensor":  # type: ignore[override]
        own: Any = source.raw if isinstance(source, DeviceTensor) else source
        raw = torch.empty(0, dtype=self.dtype).set_(own)
        return DeviceTensor.of(raw, self.on)

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return current().dispatch(func, args, kwargs or {})


def empty(size: Any, *, device: torch.device, dtype: torch.dtype | None = None, stride: Any = None) -> DeviceTensor:
    """Allocate a tensor on the current stream of a device."""
    fake = current()
    index = fake.machine.thread.device if device.index is None else device.index
    kind, shape = dtype or torch.get_default_dtype(), torch.Size(size)
    strides = _contiguous(shape) if stride is None else stride
    extent = 1 + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    size_bytes = 0 if 0 in shape else extent * kind.itemsize
    memory = fake.memory.on_device(index, size_bytes)[:size_bytes]
    return DeviceTensor.of(memory.view(kind).as_strided(shape, strides), torch.device("cuda", index))


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def tensors_in(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def mapped(values: Any, change: Callable[[Tensor], Any]) -> Any:
    """Change every tensor within arguments or results."""
    if isinstance(values, Tensor):
        return change(values)
    if values is None or isinstance(values, (int, float)):
        return values
    if isinstance(values, (list, tuple)) and not isinstance(values, torch.Size):
        parts = [mapped(value, change) for value in values]
        return parts if isinstance(values, list) else tuple(parts)
    if isinstance(values, dict):
        return {name: mapped(value, change) for name, value in values.items()}
    return values
