"""A HostAccelerator that counts what it gives out."""

import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.runtime.device.registered_memory import MemoryDriver
from alignedserve.runtime.device.streams import DeviceStreams, HostStreams
from alignedserve.runtime.kv.staged_copies import CopyLanes
from lab.gpu_check.host_accelerator import HostAccelerator
from tests.support.devices.memory_drivers import NotedDriver


class CpuAccelerator(HostAccelerator):
    """Its streams do everything at once, or are these; new memory holds anything."""

    def __init__(self, streams: DeviceStreams | None = None, driver: MemoryDriver | None = None) -> None:
        super().__init__()
        self.driver = driver or NotedDriver()
        self.num_streams_made = 0
        self.num_large_rows = 0  # allocated, of more than a digest
        self._streams = streams or HostStreams()

    @override
    def streams(self) -> DeviceStreams:
        self.num_streams_made += 1
        return self._streams

    @override
    def empty(self, num_rows: int, row_bytes: int) -> Tensor:
        self.num_large_rows += row_bytes > 8
        return torch.full((num_rows, row_bytes), 0xA5, dtype=torch.uint8)

    @override
    def pinned(self, num_rows: int, row_bytes: int) -> Tensor:
        return torch.full((num_rows, row_bytes), 0x5A, dtype=torch.uint8)


def cpu_lanes(streams: DeviceStreams | None = None, driver: MemoryDriver | None = None) -> CopyLanes:
    return CopyLanes(CpuAccelerator(streams, driver))
