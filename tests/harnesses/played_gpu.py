"""A pytest plugin that plays a machine with one GPU for a whole run, to see what the tests for one would do there:

TRITON_INTERPRET=1 python -m pytest -p tests.harnesses.played_gpu tests/gpu_kernels -m ""

The fake CUDA is the GPU, so tests that have it in place of one are skipped, as on a GPU; kernels refuse tensors of the
host, as compiled ones do. What belongs to another process, `cuda_ipc` for one, has no GPU.
"""

import contextlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from kernels.gpu import launching
from tests.support import fake_cuda
from tests.support.fake_cuda import kernels
from tests.support.fake_cuda.tensors import DeviceTensor

_OF_OTHERS = ("test_compiling.py", "test_signatures.py")  # for GPUs that are not here; of PyTorch's own torch.cuda
_MEMORY_BYTES = 4 << 30
_running = threading.local()  # whether this thread performs a kernel, whose tensors are the host's


def pytest_configure(config: pytest.Config) -> None:
    """Begin to play, until the run ends."""
    assert launching.is_interpreted(), "TRITON_INTERPRET=1 says that Triton interprets"
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    patch.setattr(interpreter.InterpretedFunction, "run", _refusing(interpreter.InterpretedFunction.run))
    patch.setattr(kernels, "_launch", _noting(kernels._launch))
    patch.setattr(launching, "is_interpreted", _is_interpreted)
    playing = contextlib.ExitStack()
    playing.enter_context(fake_cuda.fake_cuda(pace=1.0, device_bytes=_MEMORY_BYTES))
    config.add_cleanup(playing.close)
    patch.setattr(fake_cuda, "_has_gpu", lambda: True)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what says nothing here."""
    return True if collection_path.name in _OF_OTHERS else None


def _refusing(run: Any) -> Any:
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        if not getattr(_running, "is_on", False):
            for one in (*args, *options.values()):
                if isinstance(one, torch.Tensor) and not isinstance(one, DeviceTensor):
                    raise TypeError(f"{self.fn.__name__}: a pointer cannot be accessed (cpu tensor?)")
        return run(self, *args, **options)

    return checked


def _noting(launch: Any) -> Any:
    """Have the kernel that is performed read the memory of the fake, which is the host's."""

    def launched(run: Any, *rest: Any) -> Any:
        def performed(*args: Any, **options: Any) -> Any:
            _running.is_on = True
            try:
                return run(*args, **options)
            finally:
                _running.is_on = False

        return launch(performed, *rest)

    return launched


def _is_interpreted() -> bool:
    """Say so to kernels alone, whose products in bfloat16 need it; no CPU is one on which they run."""
    return "gpu_dispatch" not in sys._getframe(1).f_code.co_filename
