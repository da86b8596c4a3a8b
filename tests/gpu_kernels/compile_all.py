"""Compiles what toy engines launch to machine code for GPUs that need not be here.

    python -m tests.gpu_kernels.compile_all                                    # for compute capability 9.0
    python -m tests.gpu_kernels.compile_all 80 89 90 100 120 --output FOLDER   # compiled_kernels.json in that folder
    python -m tests.gpu_kernels.compile_all 80 --forms float32 "FP8 cache"     # what these launch

The launches are recorded in Triton's interpreter (`recorded_launches`), in a process of its own; here each gets the
types, the divisibility and the constants that Triton's own binder finds in its arguments. Prints a line per kernel; one
that does not compile, needs more shared memory than the GPU has, or keeps in memory what it should hold in registers,
raises.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from benchmarks.measuring.recording import write_result
from kernels.gpu.launching import Multiprocessor, programs_at_once

# Of a thread, some for what is rarely used; where matrix units read registers alone, large heads and float32 need more.
_MOST_STACK_BYTES = {90: 64}
_MOST_STACK_BYTES_ELSEWHERE = 256
_CONVERTS_FLOAT8 = 89  # and newer
_HAS_TENSOR_MEMORY = 10  # 10.0 and 10.3
_KIB = 1024
# What shows in the compiled text whether copies run ahead of products, and which units multiply.
_INSTRUCTIONS = {
    "cp.async": r"\bcp\.async\.c[ag]\.",
    "wgmma": r"\bwgmma\.mma_async\.",
    "mma": r"\bmma\.sync\.",
    "tcgen05": r"\btcgen05\.mma\.",
}


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
    form: str  # of the toy engine that launched it first
    kernel: str
    variant: str
    registers: int  # of a thread
    stack_bytes: int  # of a thread
    shared_bytes: int  # of a program
    warps: int
    at_once: int  # programs on a multiprocessor
    is_within: bool  # it has the shared memory, and next to nothing is spilled
    has_carried_bounds: bool  # of loops, see `carried_bounds`
    instructions: dict[str, int] = field(default_factory=dict)  # in the text, by kind; those that there are


class _Pointer:
    """Stand-in for a tensor where Triton looks at its dtype and its address alone."""

    def __init__(self, dtype: str, is_aligned: bool) -> None:
        self.dtype = getattr(torch, dtype)
        self._address = 0 if is_aligned else 8

    def data_ptr(self) -> int:
        """Return an address that is divisible by 16, or is not."""
        return self._address


class Source(NamedTuple):
    """One launch as Triton compiles it."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    divisible: dict[tuple[int, ...], Any]
    options: dict[str, int]  # that the launch gives

    @property
    def key(self) -> str:
        """Return what is equal where the machine code is."""
        return repr((self.kernel.__name__, *self[1:]))

    @property
    def variant(self) -> str:
        """Return what tells it from most others of its kernel."""
        names = list(self.signature)
        constants = {names[place]: value for (place,), value in self.constants.items()}
        parts = [f"{name} {value}" for name, value in (constants | self.options).items()]
        return ", ".join((*sorted({kind for kind in self.signature.values() if kind.startswith("*")}), *parts))


def recorded(capability: int, forms: Sequence[str]) -> list[dict[str, Any]]:
    """Run toy engines in the interpreter, with the sizes that they choose on such a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "launches.json"
        command = [sys.executable, "-m", "tests.gpu_kernels.recorded_launches", str(file)]
        options = ["--shared-bytes", str(TARGETS[capability].program_shared_bytes)]
        options += ["--tensor-memory"] if capability // 10 == _HAS_TENSOR_MEMORY else []
        options += ["--forms", *forms] if forms else []
        subprocess.run([*command, *options], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})
        launches: list[dict[str, Any]] = json.loads(file.read_text())
        return launches


def source_of(launch: dict[str, Any], backend: Any, capability: int) -> tuple[Source, Any]:
    """Return a launch as Triton compiles it for this capability, with the options for that."""
    kernel = getattr(importlib.import_module(launch["module"]), launch["kernel"])
    arguments = {
        name: _Pointer(**value) if isinstance(value, dict) else value for name, value in launch["arguments"].items()
    }
    if "UPCAST" in arguments:  # for the interpreter alone
        arguments["UPCAST"] = False
    if arguments.get("CONVERTS_FLOAT8"):
        arguments["CONVERTS_FLOAT8"] = capability >= _CONVERTS_FLOAT8
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**arguments)
    packed = kernel._pack_args(backend, {**launch["options"], "debug": False}, bound, specialization, {})
    options, signature, constants, divisible = packed
    return Source(kernel, signature, constants, divisible, launch["options"]), options


def compiled(capability: int, only: Sequence[str] = (), forms: Sequence[str] = ()) -> Iterator[Compiled]:
    """Compile for one kind of GPU what toy engines launch; `only` kernels with one of these in their names."""
    gpu = GPUTarget("cuda", capability, 32)
    backend, seen = make_backend(gpu), set()
    for launch in recorded(capability, forms):
        if only and not any(part in launch["kernel"] for part in only):
            continue
        source, options = source_of(launch, backend, capability)
        if source.key not in seen:
            seen.add(source.key)
            text = ASTSource(source.kernel, source.signature, source.constants, source.divisible)
            made = triton.compile(text, target=gpu, options=options.__dict__)
            yield _described(made, capability, launch["form"], source)


def _described(made: Any, capability: int, form: str, source: Source) -> Compiled:
    target, shared_bytes = TARGETS[capability], made.metadata.shared
    num_registers, stack_bytes = usage(made.asm["cubin"])
    most_stack_bytes = _MOST_STACK_BYTES.get(capability, _MOST_STACK_BYTES_ELSEWHERE)
    found = {kind: len(re.findall(pattern, made.asm["ptx"])) for kind, pattern in _INSTRUCTIONS.items()}
    return Compiled(
        capability,
        form,
        source.kernel.__name__,
        source.variant,
        num_registers,
        stack_bytes,
        shared_bytes,
        made.metadata.num_warps,
        programs_at_once(SimpleNamespace(metadata=made.metadata, n_regs=num_registers), target.multiprocessor),
        stack_bytes <= most_stack_bytes and shared_bytes <= target.program_shared_bytes,
        bool(carried_bounds(made.asm["ttir"])),
        {kind: count for kind, count in found.items() if count},
    )


def carried_bounds(text: str) -> set[str]:
    """Return the bounds of loops that an outer loop carries from turn to turn, by a kernel in Triton's first language.

    Triton 3.6 and 3.7 take the first value of such a bound in every turn (docs/decisions/0080).
    """
    carried = {name for every in re.findall(r"iter_args\(([^)]*)\)", text) for name in re.findall(r"(%\w+) =", every)}
    return carried & {bound for pair in re.findall(r"scf\.for %\w+ = (%\w+) to (%\w+)", text) for bound in pair}


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
    parser.add_argument("--only", nargs="*", default=[], help="parts of the kernels' names")
    parser.add_argument("--forms", nargs="*", default=[], help="of toy engines; all unless named")
    parser.add_argument("--output", type=Path, help="folder for compiled_kernels.json")
    arguments = parser.parse_args()
    rows: list[Compiled] = []
    for capability in arguments.capabilities:
        for row in compiled(capability, arguments.only, arguments.forms):
            rows.append(row)
            print(
                f"{capability} {row.kernel} {row.variant}: {row.shared_bytes} bytes of shared memory, {row.registers} "
                f"registers and {row.stack_bytes} bytes of stack a thread, {row.at_once} programs at once, "
                f"{row.instructions}",
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
    problems = [f"{row.capability} {row.kernel} {row.variant}" for row in rows if row.has_carried_bounds]
    assert not problems, f"bounds of loops that an outer one carries, which Triton loses: {problems}"


if __name__ == "__main__":
    main()
