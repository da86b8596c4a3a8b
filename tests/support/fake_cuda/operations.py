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
    arguments: tuple[str, ...]
    is_list: bool  # the result is


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
    arguments = tuple(argument.name for argument in schema.arguments)
    is_list = len(schema.returns) == 1 and str(schema.returns[0].type) == "List[Tensor]"
    return Form(schema.name, is_composite, is_view, frozenset(written), tuple(returned), arguments, is_list)


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Perform one operation of PyTorch's on tensors of which at least one is on a GPU."""
    form = form_of(func)
    if form.name == "aten::copy_":
        return copy(*args, **kwargs)
    if form.is_composite:
        return func.decompose(*args, **kwargs)
    if form.is_view:
        return _view(func, args, kwargs)
    tensors = list(tensors_in((*args, *kwargs.values())))
    own = [one for one in tensors if isinstance(one, DeviceTensor)]
    device = own[0].on
    if any(one.on != device for one in own):
        raise RuntimeError(f"Expected all tensors to be on the same device, not { ({one.on for one in own}) }")
    kwargs.pop("device", None)
    if kwargs.pop("pin_memory", None):
        raise RuntimeError("only CPU memory is pinned")
    if len(own) < len(tensors):
        change = _as_argument(form, device)
        args, kwargs = mapped(args, change), mapped(kwargs, change)
        tensors = list(tensors_in((*args, *kwargs.values())))
    if form.name in _WAITS or _has_mask(form, args):
        return _now(func, form, args, kwargs, device)
    return _later(func, form, args, kwargs, tensors)


def _view(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return other views of memory, which is known at once."""
    device = next(one.on for one in args if isinstance(one, DeviceTensor))
    result = func(*[one.raw if isinstance(one, DeviceTensor) else one for one in args], **kwargs)
    if isinstance(result, Tensor):
        return DeviceTensor.of(result, device)
    return mapped(result, lambda raw: DeviceTensor.of(raw, device))


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


def _later(func: Any, form: Form, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
    """Enqueue a kernel; return its results, which it fills later, or its arguments that it changes."""
    named = dict(zip(form.arguments, args, strict=False)) | kwargs
    device = tensors[0].device
    changed = [named[name] for name in form.written]
    if form.returned and all(form.returned):
        _enqueue(func, form, args, kwargs, ([], changed, tensors))
        results = [named[name] for name in form.returned if name]
        return results[0] if len(results) == 1 else tuple(results)
    shapes = _shapes(func, args, kwargs)
    made = [None if one is None else empty(one[0], stride=one[1], dtype=one[2], device=device) for one in shapes]
    if form.name not in _EMPTY:
        _enqueue(func, form, args, kwargs, (made, changed, tensors))
    if form.is_list:
        return made
    return made[0] if len(form.returned) == 1 else tuple(made)


def _enqueue(func: Any, form: Form, args: Any, kwargs: Any, uses: tuple[list[Any], list[Tensor], list[Tensor]]) -> None:
    made, changed, tensors = uses
    writes = [*(one for one in made if one is not None), *changed]
    current().enqueue(form.name, _step(func, args, kwargs, made), tensors, writes)


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
