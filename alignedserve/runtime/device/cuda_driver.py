"""The driver of CUDA devices, as what registers host memory."""

import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)

_CUDA: Any = torch.cuda
_PORTABLE = 1  # cudaHostRegisterPortable: for all of the process's contexts


class CudaDriver:
    """The CUDA runtime of this process."""

    def register(self, address: int, size: int) -> str | None:
        """See MemoryDriver."""
        runtime = _CUDA.cudart()
        code = runtime.cudaHostRegister(address, size, _PORTABLE)
        return None if int(code) == 0 else str(runtime.cudaGetErrorString(code))

    def unregister(self, address: int) -> None:
        """See MemoryDriver."""
        runtime = _CUDA.cudart()
        code = runtime.cudaHostUnregister(address)
        if int(code) != 0:
            logger.error("memory stays registered: %s", runtime.cudaGetErrorString(code))
