"""A CUDA without a GPU: what the project asks of torch.cuda, executed on this host with CUDA's own rules.

`fake_cuda()` puts it in place of torch.cuda for its body. Tensors of device `cuda` then lie in memory of the fake, each
of the stream that made it (`memory`); operations on them are steps of streams, done later in any order that events
allow, which read memory when they run (`machine`, `operations`, `device_copies`); Triton's kernels are checked and then
done by its interpreter (`kernels`); graphs are recorded, and the driver keeps its last error (`runtime`).

Kernels, launches, bytes and waits of the host are counted in `FakeCuda.machine.counts`.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.fake_cuda import kernels, patches, runtime
from tests.support.fake_cuda.fakes import FakeCuda, install, uninstall
from tests.support.fake_cuda.machine import Counts
from tests.support.fake_cuda.operations import dispatch
from tests.support.fake_cuda.tensors import empty

__all__ = ["Counts", "FakeCuda", "fake_cuda"]

_has_gpu = torch.cuda.is_available  # as it was before anything stood in its place


@contextlib.contextmanager
def fake_cuda(seed: int = 0, **options: Any) -> Iterator[FakeCuda]:
    """Have a fake CUDA in this process, in every thread; `options`: see FakeCuda. No other may be installed.

    Skips the test where there is a GPU: Triton compiles kernels for that one, which cannot read this one's memory.
    """
    if _has_gpu():
        pytest.skip("there is a GPU here, beside which nothing stands in for one")
    fake = FakeCuda(dispatch, seed, **options)
    with contextlib.ExitStack() as stack:
        for name, stand_in in runtime.NAMES.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        for owner, name, stand_in in (*patches.all_patches(), *kernels.all_patches()):
            stack.enter_context(mock.patch.object(owner, name, stand_in, create=True))
        install(fake)
        try:
            _dispatch_once()
            yield fake
        finally:
            uninstall(fake)


def _dispatch_once() -> None:
    """Have PyTorch look at its first tensor of another class, for which it imports 800 modules, without these."""
    name = "torch.distributed.tensor"
    if name in sys.modules:
        return
    stand_in: Any = ModuleType(name)
    stand_in.DTensor = type("DTensor", (), {})
    sys.modules[name] = stand_in
    try:
        empty((), device=torch.device("cuda", 0)).view(1)
    finally:
        del sys.modules[name]
