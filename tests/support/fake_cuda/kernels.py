"""Triton's kernels on the fake CUDA: what a GPU would refuse is refused, the interpreter does the rest in its turn."""

import contextlib
import inspect
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.fake_cuda.fakes import current
from tests.support.fake_cuda.tensors import DeviceTensor

_MOST_PROGRAMS = (2**31 - 1, 65535, 65535)
_OFTEN_ALIGNED = 16  # bytes: addresses that are not make Triton compile another kernel, with narrower loads
_interpreting = threading.Lock()  # the interpreter's grid is of the whole process


class LaunchRefused(AssertionError):
    """A kernel was launched with arguments that a GPU would not take, or take wrongly."""


@dataclass
class CompiledStandIn:
    """What is read of a compiled kernel."""

    n_regs: int = 128

    @property
    def metadata(self) -> Any:
        return SimpleNamespace(num_warps=4, shared=64 << 10)


def all_patches() -> Iterator[tuple[Any, str, Any]]:
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    run = interpreter.InterpretedFunction.run

    def launched(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not any(isinstance(one, DeviceTensor) for one in (*args, *options.values())):
            return run(self, *args, grid=grid, warmup=warmup, **options)
        return _launch(partial(run, self), self.fn, args, grid, options)

    yield interpreter.InterpretedFunction, "run", launched
    # All memory is the host's: there is nothing to copy back, where the interpreter would copy all of it onto itself.
    yield interpreter.GridExecutor, "_restore_args_dev", lambda *_: None


def _launch(run: Any, function: Any, args: Any, grid: Any, options: dict[str, Any]) -> CompiledStandIn:
    fake, name = current(), function.__name__
    named = dict(zip(inspect.signature(function).parameters, args, strict=False)) | options
    programs = grid(named) if callable(grid) else grid
    _check_grid(name, programs)
    _check_arguments(name, named)
    tensors = [one for one in named.values() if isinstance(one, DeviceTensor)]
    own = [fake.alias(one) if isinstance(one, DeviceTensor) else one for one in args]
    own_options = {key: fake.alias(one) if isinstance(one, DeviceTensor) else one for key, one in options.items()}

    def work() -> None:
        with _interpreting, _refusing_overflows(name):
            run(*own, grid=programs, warmup=False, **own_options)

    fake.enqueue(name, work, tensors, tensors)
    return CompiledStandIn()


@contextlib.contextmanager
def _refusing_overflows(name: str) -> Iterator[None]:
    """Refuse sums and products of signed integers that need more bits than they have, as offsets of 32 bits may.

    Triton's interpreter asserts that there are none where a kernel is debugged.
    """
    from triton.runtime import interpreter
    from triton.runtime.errors import InterpreterError

    builder = interpreter.interpreter_builder
    options = builder.options
    builder.options = replace(options, debug=True)
    try:
        yield
    except InterpreterError as error:
        if "overflow detected" not in str(error):
            raise
        raise LaunchRefused(f"{name}: {error}") from error
    finally:
        builder.options = options


def _check_grid(name: str, programs: Any) -> None:
    for count, most in zip(programs, _MOST_PROGRAMS, strict=False):
        if not 0 < count <= most:
            raise LaunchRefused(f"{name}: a grid of {tuple(programs)} programs")


def _check_arguments(name: str, named: dict[str, Any]) -> None:
    device = current().machine.thread.device
    for key, one in named.items():
        if not isinstance(one, torch.Tensor):
            continue
        if not isinstance(one, DeviceTensor):
            raise LaunchRefused(f"{name}: {key} is a tensor of the host")
        if one.device.index != device:
            raise LaunchRefused(f"{name}: {key} is on {one.device}, and the kernel on cuda:{device}")
        if one.dim() and one.shape[-1] > 1 and one.stride(-1) != 1:
            raise LaunchRefused(f"{name}: {key} has elements {one.stride(-1)} apart")
        if one.numel() and one.data_ptr() % one.element_size():
            raise LaunchRefused(f"{name}: {key} does not begin with a whole element")
        if one.numel() and one.data_ptr() % _OFTEN_ALIGNED:
            current().unaligned[name, key] += 1
