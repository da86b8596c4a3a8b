"""Stand-ins for a GPU's driver: they note which memory is registered with them."""

from typing import Any, ClassVar

import torch


class NotedDriver:
    """A MemoryDriver that takes no more than so many bytes at a time, and refuses from the n-th call on."""

    def __init__(self, *, num_allowed: int = 1 << 30, largest: int = 64 << 30) -> None:
        self.registered: dict[int, int] = {}  # bytes by address
        self.calls: list[tuple[str, int]] = []
        self._num_allowed = num_allowed
        self._largest = largest

    def register(self, address: int, size: int) -> str | None:
        self.calls.append(("register", address))
        assert address not in self.registered
        if size > self._largest or len(self.registered) >= self._num_allowed:
            return "out of memory"
        self.registered[address] = size
        return None

    def unregister(self, address: int) -> None:
        self.calls.append(("unregister", address))
        del self.registered[address]


class StandInCuda:
    """Registrations by CUDA's two libraries: the runtime keeps what it refuses as its last error, the driver does not.

    `library` is libcuda, with the calls of `CudaDriver`; `cudart` is what `torch.cuda.cudart()` returns.
    """

    INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, NOT_REGISTERED = 1, 2, 201, 713
    REASONS: ClassVar = {1: b"invalid argument", 2: b"out of memory", 201: b"invalid device context"}
    CONTEXT = 0x1234

    def __init__(self, *, largest: int = (512 << 30) - 1, num_devices: int = 1) -> None:
        """`largest`: bytes of one registration."""
        self.registered: dict[int, int] = {}
        self.num_retained = 0
        self._last_error = 0
        self._largest = largest
        self._num_devices = num_devices
        self._contexts: list[int] = []
        self.library, self.cudart = self, self

    def launch(self) -> None:
        """Launch a kernel, as PyTorch does: the last error, whosever it is, is raised."""
        error, self._last_error = self._last_error, 0
        if error:
            raise torch.AcceleratorError(f"CUDA error: {self.REASONS[error].decode()}\nand more")

    # --- the runtime

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self._last_error = self._register(address, size)
        return self._last_error

    # --- the driver

    def cuDeviceGet(self, handle: Any, ordinal: int) -> int:
        handle._obj.value = ordinal
        return 0 if ordinal < self._num_devices else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, handle: Any) -> int:
        context._obj.value = self.CONTEXT
        self.num_retained += 1
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, handle: Any) -> int:
        self.num_retained -= 1
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self._contexts.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        context._obj.value = self._contexts.pop()
        return 0

    def cuMemHostRegister_v2(self, address: int, size: int, flags: int) -> int:
        return self._register(address, size) if self._contexts == [self.CONTEXT] else self.INVALID_CONTEXT

    def cuMemHostUnregister(self, address: int) -> int:
        if not self._contexts:
            return self.INVALID_CONTEXT
        return 0 if self.registered.pop(address, None) is not None else self.NOT_REGISTERED

    def cuGetErrorString(self, code: int, reason: Any) -> int:
        reason._obj.value = self.REASONS.get(code)
        return 0 if code in self.REASONS else self.INVALID_VALUE

    def _register(self, address: int, size: int) -> int:
        if size > self._largest:
            return self.OUT_OF_MEMORY
        self.registered[address] = size
        return 0
