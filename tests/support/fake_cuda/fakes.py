"""The fake that is installed in this process, and what its parts ask of it."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from tests.support.devices.memory_drivers import StandInCuda
from tests.support.fake_cuda.machine import Machine
from tests.support.fake_cuda.memory import Memory

_installed: list["FakeCuda"] = []


class FakeCuda:
    """A machine and its memory."""

    def __init__(
        self,
        dispatch: Callable[..., Any],
        seed: int = 0,
        *,
        num_devices: int = 1,
        pace: float = 0.3,
        device_bytes: int = 1 << 28,
        host_bytes: int = 1 << 28,
        driver: StandInCuda | None = None,
    ) -> None:
        """`dispatch`: performs operations; `pace`: of devices, see Machine; `device_bytes`: of each, taken from the
        host only as they are written; `driver`: both of CUDA's libraries, as far as host memory is registered."""
        self.dispatch = dispatch
        self.machine = Machine(seed, num_devices=num_devices, pace=pace)
        self.driver = driver or StandInCuda(num_devices=num_devices)
        self.num_mapped = 0  # memories of other processes
        self.unaligned: Counter[tuple[str, str]] = Counter()  # arguments of kernels that were not at 16 bytes
        self.nccl_meetings: dict[str, Any] = {}  # of the ranks of each group, by the file that they meet at
        self.memory = Memory(self.machine, self.driver, device_bytes=device_bytes, host_bytes=host_bytes)

    def is_own(self, tensor: Tensor) -> bool:
        return hasattr(tensor, "raw")

    def raw(self, tensor: Any) -> Tensor:
        raw: Tensor = tensor.raw
        return raw

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a tensor's memory as a plain tensor that keeps none of it alive; of a plain one, itself."""
        raw = getattr(tensor, "raw", None)
        return tensor if raw is None else self.memory.alias(raw)

    def enqueue(self, name: str, call: Callable[[], object], read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Enqueue one kernel."""
        self.driver.launch()
        with self.on(written[0].device.index):
            self.machine.enqueue(name, [call], read=_num_bytes(read), written=_num_bytes(written))

    @contextlib.contextmanager
    def on(self, index: int) -> Iterator[None]:
        """Have this device be the thread's current one."""
        thread = self.machine.thread
        before, thread.device = thread.device, index
        try:
            yield
        finally:
            thread.device = before


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum({id(one): one.nbytes for one in tensors}.values())


def current() -> FakeCuda:
    assert _installed, "no fake CUDA is installed"
    return _installed[-1]


def is_installed() -> bool:
    return bool(_installed)


def install(fake: FakeCuda) -> None:
    _installed.append(fake)


def uninstall(fake: FakeCuda) -> None:
    _installed.remove(fake)
