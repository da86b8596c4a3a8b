"""Compiles every GPU kernel to machine code for GPUs that need not be here.

    python -m tests.gpu_kernels.compile_all                                    # for compute capability 9.0
    python -m tests.gpu_kernels.compile_all 80 89 90 120 --output FOLDER       # compiled_kernels.json in that folder

Without TRITON_INTERPRET, so in a process of its own. Sizes and addresses are divisible by 16 and warps as many as where
the kernels are launched. Prints a line per kernel; one that does not compile, needs more shared memory than the GPU
has, or keeps in memory what it should hold in registers, raises.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.measuring.recording import write_result
from kernels.gpu.launching import Multiprocessor, programs_at_once
from tests.gpu_kernels.compiled_cases import Case, Gpu, cases

# Of a thread, some for what is rarely used; where matrix units read registers alone, large heads and float32 need more.
_MOST_STACK_BYTES = {90: 64, 100: 64}
_MOST_STACK_BYTES_ELSEWHERE = 256
_NOT_SIZES = ("window", "site", "num_runs", "num_rows", "num_experts", "num_chosen", "run_groups")  # of any value
_CONVERTS_FLOAT8 = 89  # and newer
_KIB = 1024


class Target(NamedTuple):
    """A kind of GPU, by NVIDIA's table of compute capabilities."""

    name: str
    multiprocessor: Multiprocessor
    program_shared_bytes: int  # that one program may have


_REGISTERS = 64 * _KIB
TARGETS = {
    80: Target("A100", Multiprocessor(_REGISTERS, 164 * _KIB, 2048, 32), 163 * _KIB),
    86: Target("A10, RTX 30", Multiprocessor(_REGISTERS, 100 * _KIB, 1536, 32), 99 * _KIB),
    89: Target("L4, L40, RTX 40", Multiprocessor(_REGISTERS, 100 * _KIB, 1536, 32), 99 * _KIB),
    90: Target("H100, H200", Multiprocessor(_REGISTERS, 228 * _KIB, 2048, 32), 227 * _KIB),
    100: Target("B200", Multiprocessor(_REGISTERS, 228 * _KIB, 2048, 32), 227 * _KIB),
    120: Target("RTX 50", Multiprocessor(_REGISTERS, 100 * _KIB, 1536, 32), 99 * _KIB),
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a compiled kernel asks of a GPU. Every field is plain JSON."""

    capability: int
    kernel: str
    variant: str
    registers: int  # of a thread
    stack_bytes: int  # of a thread
    shared_bytes: int  # of a program
    warps: int
    at_once: int  # programs on a multiprocessor
    is_within: bool  # it has the shared memory, and next to nothing is spilled


def compiled(capability: int, only: str = "") -> Iterator[Compiled]:
    """Compile every kernel in every variant for one kind of GPU; `only` those with this in their names."""
    target = TARGETS[capability]
    gpu = Gpu(target.program_shared_bytes, capability >= _CONVERTS_FLOAT8)
    for case in cases(gpu):
        if only not in case.kernel.__name__:
            continue
        found = triton.compile(_source(case), target=GPUTarget("cuda", capability, 32), options=case.options)
        num_registers, stack_bytes = usage(found.asm["cubin"])
        kernel = SimpleNamespace(metadata=found.metadata, n_regs=num_registers)
        shared_bytes = found.metadata.shared
        most_stack_bytes = _MOST_STACK_BYTES.get(capability, _MOST_STACK_BYTES_ELSEWHERE)
        is_within = stack_bytes <= most_stack_bytes and shared_bytes <= target.program_shared_bytes
        at_once = programs_at_once(kernel, target.multiprocessor)
        if capability == 90:
            assert case.side_by_side <= at_once, f"{case.kernel.__name__}: only {at_once} programs run at once"
        yield Compiled(
            capability,
            case.kernel.__name__,
            case.variant,
            num_registers,
            stack_bytes,
            shared_bytes,
            found.metadata.num_warps,
            at_once,
            is_within,
        )


def _source(case: Case) -> ASTSource:
    signature = {name: case.types.get(name, "constexpr") for name in case.kernel.arg_names}
    sizes = [name.startswith("*") or name in ("i32", "i64") for name in signature.values()]
    divisible = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, is_size) in enumerate(zip(signature, sizes, strict=True))
        if is_size and name not in _NOT_SIZES
    }
    return ASTSource(fn=case.kernel, signature=signature, constexprs=case.constants, attrs=divisible)


def usage(cubin: bytes) -> tuple[int, int]:
    """Return a thread's registers, and bytes of stack where they were too few."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


def main() -> None:
    """Compile for every capability that was asked for; print and record what is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capabilities", nargs="*", type=int, choices=[[], *TARGETS], default=[90])
    parser.add_argument("--only", default="", help="part of the kernels' names")
    parser.add_argument("--output", type=Path, help="folder for compiled_kernels.json")
    arguments = parser.parse_args()
    rows: list[Compiled] = []
    for capability in arguments.capabilities:
        for row in compiled(capability, arguments.only):
            rows.append(row)
            print(
                f"{capability} {row.kernel} {row.variant}: {row.shared_bytes} bytes of shared memory, {row.registers} "
                f"registers and {row.stack_bytes} bytes of stack a thread, {row.at_once} programs at once",
                flush=True,
            )
    if arguments.output is not None:
        figures = {
            "what": "estimates from compiled code: no GPU ran it",
            "triton": triton.__version__,
            "rows": [asdict(row) for row in rows],
        }
        print(write_result("compiled_kernels", figures, folder=arguments.output))
    problems = [f"{row.capability} {row.kernel} {row.variant}" for row in rows if not row.is_within]
    assert not problems, f"too much shared memory or stack: {problems}"


if __name__ == "__main__":
    main()
