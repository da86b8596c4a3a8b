"""A CPU in the place of a device: the paths of a device's copies, where no device is at hand."""

import torch
from torch import Tensor

from alignedserve.core.errors import HandoffRejected
from alignedserve.runtime.device.accelerator import SharedRows
from alignedserve.runtime.device.registered_memory import MemoryDriver
from alignedserve.runtime.device.streams import DeviceStreams, HostStreams


class _NoDriver:
    def register(self, address: int, size: int) -> None: ...

    def unregister(self, address: int) -> None: ...


class HostAccelerator:
    """An Accelerator with one memory, the host's, in which what is mapped is what was lent."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.driver: MemoryDriver = _NoDriver()
        self._lent: list[Tensor] = []

    def use(self) -> None: ...

    def streams(self) -> DeviceStreams:
        return HostStreams()

    def empty(self, num_rows: int, row_bytes: int) -> Tensor:
        return torch.empty((num_rows, row_bytes), dtype=torch.uint8)

    def pinned(self, num_rows: int, row_bytes: int) -> Tensor:
        return torch.empty((num_rows, row_bytes), dtype=torch.uint8)

    def lendable(self, num_rows: int, row_bytes: int) -> Tensor:
        return torch.zeros((num_rows, row_bytes), dtype=torch.uint8)

    def exported(self, rows: Tensor) -> SharedRows:
        """Meant for this very process."""
        self._lent.append(rows)
        return SharedRows("cpu", str(len(self._lent) - 1).encode(), rows.nbytes, 0, b"", 0, b"", False)

    def mapped(self, handle: SharedRows, num_rows: int, row_bytes: int) -> Tensor:
        if int(handle.handle) >= len(self._lent):
            raise HandoffRejected("the blocks are not in a device's memory")
        if handle.storage_bytes < num_rows * row_bytes:
            raise HandoffRejected("the blocks are more than the memory that is offered")
        return self._lent[int(handle.handle)]
