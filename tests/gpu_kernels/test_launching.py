"""The programs of a kernel that a GPU runs at once, by what the compiled kernel takes and the GPU has."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from kernels.gpu.launching import Multiprocessor, multiprocessor_of, programs_at_once

pytestmark = pytest.mark.slow

H100 = Multiprocessor(64 * 1024, 228 * 1024, 2048, 32)
RTX_4090 = Multiprocessor(64 * 1024, 100 * 1024, 1536, 32)


def kernel(num_warps: int, registers: int, shared: int) -> SimpleNamespace:
    return SimpleNamespace(metadata=SimpleNamespace(num_warps=num_warps, shared=shared), n_regs=registers)


@pytest.mark.parametrize(
    ("num_warps", "registers", "shared", "on_h100", "on_4090"),
    [
        (4, 128, 70_000, 3, 1),  # shared memory
        (4, 168, 20_000, 3, 3),  # registers: 128 threads of 168 take 21 504 of 65 536
        (4, 161, 0, 3, 3),  # given out in eights: as 168
        (8, 32, 0, 8, 6),  # threads
        (4, 255, 200_000, 1, 1),  # never none: it has been launched
    ],
)
def test_the_scarcest_limits_the_programs(
    num_warps: int, registers: int, shared: int, on_h100: int, on_4090: int
) -> None:
    own = kernel(num_warps, registers, shared)
    assert (programs_at_once(own, H100), programs_at_once(own, RTX_4090)) == (on_h100, on_4090)


def test_limits_are_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        regs_per_multiprocessor=65536,
        shared_memory_per_multiprocessor=102400,
        max_threads_per_multi_processor=1536,
        warp_size=32,
        multi_processor_count=128,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert multiprocessor_of(torch.device("cuda:1")) == RTX_4090
