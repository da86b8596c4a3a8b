"""Launch parameters that the kernels share, and the programs of a compiled kernel that a GPU runs at once."""

import functools
from typing import Any, NamedTuple, Protocol

import torch
import triton

_LEAST_SIDE = 16  # of a matrix product
_ELEMENTS_OF_WARP = 512  # of a row, 16 for each of its threads
_MOST_WARPS = 16

# Of a program. Compute capabilities 9.0 and 10.0 have more, 8.0 has 163 KiB, 8.6, 8.9 and 12.0 have 99 KiB; the first
# two also multiply out of shared memory, so that larger tiles do not run out of registers.
LARGE_SHARED_BYTES = 200 * 1024

# Compute capability from which on it is one instruction for two elements.
_CONVERTS_FLOAT8 = (8, 9)
_HAS_TENSOR_MEMORY = 10

_REGISTERS_AT_ONCE = 8  # a thread's are given out in such steps
_SHARED_BYTES_OF_INTERPRETER = 227 * 1024
_TENSOR_MEMORY_OF_INTERPRETER = False
_OWN_SHARED_BYTES = 1024  # that the driver takes of a multiprocessor for each program


class CompiledKernel(Protocol):
    """What is read of Triton's kernels after their first launch."""

    metadata: Any  # num_warps, and bytes of shared memory: shared
    n_regs: int  # of a thread


class Multiprocessor(NamedTuple):
    """What the programs that run at once on a multiprocessor share."""

    registers: int
    shared_bytes: int
    threads: int
    threads_of_warp: int


def multiprocessor_of(device: torch.device) -> Multiprocessor:
    """Return the limits of this GPU."""
    gpu: Any = torch.cuda.get_device_properties(device)
    return Multiprocessor(
        gpu.regs_per_multiprocessor,
        gpu.shared_memory_per_multiprocessor,
        gpu.max_threads_per_multi_processor,
        gpu.warp_size,
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    gpu: Any = torch.cuda.get_device_properties(device)
    return int(gpu.multi_processor_count)


@functools.cache
def program_shared_bytes(device: torch.device) -> int:
    """Return how much shared memory one program may have on this GPU; in Triton's interpreter that of an H100."""
    if device.type != "cuda":
        return _SHARED_BYTES_OF_INTERPRETER
    gpu: Any = torch.cuda.get_device_properties(device)
    return int(gpu.shared_memory_per_block_optin)


@functools.cache
def converts_float8(device: torch.device) -> bool:
    """Return whether this GPU converts FP8 (e4m3) itself; Triton's interpreter does, as an H100."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _CONVERTS_FLOAT8


@functools.cache
def has_tensor_memory(device: torch.device) -> bool:
    """Return whether this GPU's products have a memory of their own for sums (compute capability 10), for which Triton
    brings twice as much through shared memory; its interpreter has none, as an H100."""
    if device.type != "cuda":
        return _TENSOR_MEMORY_OF_INTERPRETER
    return torch.cuda.get_device_capability(device)[0] == _HAS_TENSOR_MEMORY


def programs_at_once(kernel: CompiledKernel, limits: Multiprocessor) -> int:
    """Return how many programs of the kernel run on a multiprocessor at once, at least 1."""
    threads = kernel.metadata.num_warps * limits.threads_of_warp
    registers = threads * -(-max(kernel.n_regs, 1) // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE
    shared = kernel.metadata.shared + _OWN_SHARED_BYTES
    return max(1, min(limits.registers // registers, limits.shared_bytes // shared, limits.threads // threads))


def padded(size: int) -> int:
    return max(_LEAST_SIDE, power_of_two(size))


def power_of_two(size: int) -> int:
    """Return the least power of two that is at least `size`, which is above 0. Triton's own functions for this and
    `parts_of` are for kernels as well, and take the host twenty times as long."""
    return 1 << (size - 1).bit_length()


def parts_of(size: int, part: int) -> int:
    """Return how many parts of one size make up at least `size`."""
    return -(-size // part)


def row_warps(padded_width: int) -> int:
    return min(max(1, padded_width // _ELEMENTS_OF_WARP), _MOST_WARPS)


def is_interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


def upcast(dtype: torch.dtype) -> bool:
    """Return whether to widen factors to float32 before a product: Triton's interpreter multiplies bfloat16 wrongly."""
    return dtype == torch.bfloat16 and is_interpreted()
