"""Operations of PyTorch's on the fake CUDA's tensors, each a step of the current stream.

What PyTorch would have the host wait for (values, results whose size depends on values) is a wait here; what it would
refuse is refused.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.fake_cuda.device_copies import copy
from tests.support.fake_cuda.fakes import current
from tests.support.fake_cuda.tensors import DeviceTensor, empty, mapped, tensors_in

# Their results' sizes, or values, are the host's to know.
_WAITS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::is_nonzero",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::repeat_interleave",
}
_VIEWS = {"aten::_unsafe_view", "aten::lift_fresh", "aten::_reshape_alias"}
_EMPTY = {"aten::empty_like", "aten::new_empty", "aten::new_empty_strided", "aten::empty_strided"}


class Form(NamedTuple):
    """What an operation does with its arguments, by its schema."""

    name: str
    is_composite: bool  # of other operations
    is_view: bool
    written: frozenset[str]  # arguments
    returned: tuple[str | None, ...]  # for each result, the argument that it is


@cache
def form_of(func: Any) -> Form:
    schema = func._schema
    written: dict[str, frozenset[str]] = {}
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            written[argument.name] = frozenset(argument.alias_info.before_set)
    returned: list[str | None] = []
    is_view = schema.name in _VIEWS
    for result in schema.returns:
        alias = result.alias_info
        same = None
        if alias is not None and alias.is_write:
            same = next(name for name, aliases in written.items() if aliases & frozenset(alias.before_set))
        elif alias is not None:
            is_view = True
        returned.append(same)
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return Form(schema.name, is_composite, is_view, frozenset(written), tuple(returned))


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Perform one operation of PyTorch's on tensors of which at least one is on a GPU."""
    form = form_of(func)
    if form.name == "aten::copy_":
        return copy(*args, **kwargs)
    if form.is_composite:
        return func.decompose(*args, **kwargs)
    devices = {one.on for one in tensors_in((*args, *kwargs.values())) if isinstance(one, DeviceTensor)}
    device = devices.pop()
    if devices:
        raise RuntimeError(f"Expected all tensors to be on the same device, not {device} and {devices}")
    if form.is_view:
        result = func(*mapped(args, _raw), **mapped(kwargs, _raw))
        return mapped(result, lambda raw: DeviceTensor.of(raw, device))
    kwargs.pop("device", None)
    if kwargs.pop("pin_memory", None):
        raise RuntimeError("only CPU memory is pinned")
    args, kwargs = mapped(args, _as_argument(form, device)), mapped(kwargs, _as_argument(form, device))
    if form.name in _WAITS or _has_mask(form, args):
        return _now(func, form, args, kwargs, device)
    return _later(func, form, args, kwargs, device)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.raw if isinstance(tensor, DeviceTensor) else tensor


def _has_mask(form: Form, args: Sequence[Any]) -> bool:
    if form.name not in ("aten::index", "aten::index_put", "aten::index_put_"):
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _as_argument(form: Form, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return what makes an argument one of a kernel: numbers of the host go with the launch, lists of places by a copy
    that it waits for."""

    def change(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DeviceTensor):
            return tensor
        if not tensor.dim():
            return tensor.clone()
        if form.name.startswith("aten::index"):
            return tensor.to(device)
        raise RuntimeError(f"Expected all tensors to be on the same device: {form.name} has one of the host")

    return change


def _now(func: Any, form: Form, args: Any, kwargs: Any, device: torch.device) -> Any:
    fake = current()
    fake.machine.synchronise(fake.machine.current(device.index), form.name)
    result = func(*mapped(args, _raw), **mapped(kwargs, _raw))
    if not any(form.returned):
        return mapped(result, lambda own: _uploaded(own, device))
    return args[0]


def _uploaded(own: Tensor, device: torch.device) -> Tensor:
    made = empty(own.shape, dtype=own.dtype, device=device)
    made.raw.copy_(own)
    return made


def _later(func: Any, form: Form, args: Any, kwargs: Any, device: torch.device) -> Any:
    fake = current()
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    shapes = _shapes(func, args, kwargs)
    results = []
    for number, shape in enumerate(shapes):
        same = form.returned[number] if len(form.returned) == len(shapes) else None
        if same is not None:
            results.append(named[same])
        elif shape is None:
            results.append(None)
        else:
            size, stride, dtype = shape
            results.append(empty(size, stride=stride, dtype=dtype, device=device))
    if form.name not in _EMPTY:
        made = [one for one, same in zip(results, (*form.returned, *[None] * len(results)), strict=False) if not same]
        changed = [one for name, one in named.items() if name in form.written]
        reads = list(tensors_in((*args, *kwargs.values())))
        writes = [one for one in (*made, *changed) if one is not None]
        fake.enqueue(form.name, _step(func, args, kwargs, made), reads, writes)
    returns = func._schema.returns
    if len(returns) == 1 and str(returns[0].type) != "List[Tensor]":
        return results[0]
    return results if len(returns) == 1 else tuple(results)


def _step(func: Any, args: Any, kwargs: Any, made: Sequence[Tensor | None]) -> Callable[[], None]:
    alias = current().alias
    own_args, own_kwargs = mapped(args, alias), mapped(kwargs, alias)
    targets = [None if one is None else alias(one) for one in made]

    def run() -> None:
        values = func(*own_args, **own_kwargs)
        if not targets:
            return
        parts = values if isinstance(values, (list, tuple)) else (values,)
        for target, value in zip(targets, parts, strict=True):
            if target is not None:
                target.copy_(value)

    return run


_known: dict[Any, list[Any]] = {}


def _shapes(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return size, stride and dtype of each result; known for arguments that were seen before."""
    returned = form_of(func).returned
    if all(returned):
        return [None] * len(returned)
    key = (func, _key(args), _key(kwargs))
    if key not in _known:
        results = func(*mapped(args, _zeros), **mapped(kwargs, _zeros))
        parts = results if isinstance(results, (list, tuple)) else (results,)
        _known[key] = [(one.shape, one.stride(), one.dtype) if isinstance(one, Tensor) else None for one in parts]
    return _known[key]


def _zeros(tensor: Tensor) -> Tensor:
    """Return as many zeros: on meta tensors the same would take a second to import."""
    if not isinstance(tensor, DeviceTensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()


def _key(values: Any) -> Any:
    if isinstance(values, Tensor):
        return (values.shape, values.stride(), values.dtype, isinstance(values, DeviceTensor))
    if isinstance(values, (list, tuple)):
        return tuple(map(_key, values))
    if isinstance(values, dict):
        return tuple((name, _key(value)) for name, value in values.items())
    return type(values), str(values) if isinstance(values, float) else values
