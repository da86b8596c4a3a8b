"""Compiles every GPU kernel to machine code for compute capability 9.0, as for an 8B Llama in bfloat16: no GPU needed.

    python -m tests.gpu_kernels.compile_all

Without TRITON_INTERPRET, so in a process of its own. Sizes and addresses are divisible by 16 and warps as many as where
the kernels are launched. Prints a line per kernel; one that does not compile, or keeps in memory what it should hold in
registers, raises.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.gpu import (
    block_copies,
    decode_attention,
    gating,
    head_placement,
    int8_blocks,
    prefill_attention,
    row_digests,
    row_norm,
    token_sampling,
)
from kernels.gpu.launching import padded, row_warps


class Case(NamedTuple):
    """A kernel as it is launched."""

    kernel: Any
    types: dict[str, str]  # of its arguments
    constants: dict[str, Any]
    options: dict[str, int] = {}  # noqa: RUF012  (never changed)
    side_by_side: int = 1  # programs that a multiprocessor must hold


HALF, FLOAT, INT, LONG = "*bf16", "*fp32", "*i32", "*i64"
HEADS = {"KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128}
PLACES = {"query_stride": "i64", "block_stride": "i64", "keys_at": "i64", "values_at": "i64"}
ATTENTION = {
    "queries": HALF,
    "blocks": HALF,
    "entries": INT,
    "starts": INT,
    "is_reversed": "*i8",
    "window": "i32",
    "scale": "fp32",
    **PLACES,
}
PARTS = {
    "part_rows": INT,
    "part_firsts": INT,
    "part_lasts": INT,
    "program_parts": INT,
    "sums": FLOAT,
    "weights": FLOAT,
    "lengths": INT,
}
TILES = {
    "tile_sequences": INT,
    "tile_rows": INT,
    "tile_positions": INT,
    "tile_counts": INT,
    "out": HALF,
    "out_stride": "i64",
}
MERGED = {"out": HALF, "row_parts": INT, "sums": FLOAT, "weights": FLOAT, "out_stride": "i64"}
WORDS = {"blocks": LONG, "block_ids": LONG, "staging": LONG, "num_words": "i32"}
ROUNDED = {"blocks": HALF, "block_ids": LONG, "rounded": "*u8", "ranges": "*fp16", "runs": "i32", "width": "i32"}
ROW_SIZES = {"row_bytes": "i32", "row_halves": "i32"}
NORM = {
    "x": HALF,
    "residual": HALF,
    "weight": HALF,
    "bias": HALF,
    "out": HALF,
    "x_stride": "i64",
    "residual_stride": "i64",
    "width": "i32",
    "eps": "fp32",
}
PLACED = {
    "fused": HALF,
    "query_weight": HALF,
    "key_weight": HALF,
    "cos": FLOAT,
    "sin": FLOAT,
    "slots": LONG,
    "keys": HALF,
    "values": HALF,
    "fused_stride": "i64",
    "eps": "fp32",
}
GATED = {"x": HALF, "out": HALF, "stride": "i64", "width": "i32"}
SAMPLED = {
    "temperatures": FLOAT,
    "top_ks": LONG,
    "top_ps": FLOAT,
    "min_ps": FLOAT,
    "draws": "*fp64",
    "token_ids": LONG,
    "is_usable": "*u8",
    "logits_stride": "i64",
    "vocabulary": "i32",
}
TILE = {"BLOCK_SIZE": 16, "PADDED_DIM": 128, "TOKENS": 64, "UPCAST": False, **HEADS}
DIGESTED = {"words": LONG, "keys": LONG, "sums": LONG}
SLOTS = {"SLOTS": 16, "PADDED": 16, "CHANNELS": 128}

_MOST_STACK_BYTES = 64  # of a thread, some for what is rarely used
_REGISTERS, _SHARED_BYTES, _OWN_SHARED_BYTES = 64 * 1024, 228 * 1024, 1024  # of a multiprocessor; of each program
_NOT_SIZES = ("window",)  # of any value


def decode_case(head_dim: int, dtype: torch.dtype, element: str) -> Case:
    """As `paged_decode` launches it."""
    types = {**ATTENTION, **PARTS, "queries": element, "blocks": element}
    constants = {**TILE, "HEAD_DIM": head_dim, "PADDED_DIM": padded(head_dim), "PADDED_GROUP": 16}
    _, num_stages, num_programs = decode_attention.occupancy(head_dim, dtype)
    return Case(decode_attention._decode_parts, types, constants, {"num_stages": num_stages}, num_programs)


def prefill_case(head_dim: int, dtype: torch.dtype, element: str) -> Case:
    """As `paged_prefill` launches it."""
    tiling = prefill_attention.tiling(head_dim, dtype)
    sizes = {"HEAD_DIM": head_dim, "PADDED_DIM": padded(head_dim), "ROWS": tiling.query_rows, "TOKENS": tiling.keys}
    types = {**ATTENTION, **TILES, "queries": element, "blocks": element, "out": element}
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    return Case(prefill_attention._prefill, types, {**TILE, **sizes, "PADDED_GROUP": 4}, options)


CASES: list[Case] = [
    decode_case(64, torch.bfloat16, HALF),
    decode_case(128, torch.bfloat16, HALF),
    decode_case(256, torch.bfloat16, HALF),
    decode_case(128, torch.float32, FLOAT),
    Case(decode_attention._merge_parts, MERGED, {"HEADS": 32, "HEAD_DIM": 128, "PADDED_DIM": 128, "PARTS": 16}),
    prefill_case(128, torch.bfloat16, HALF),
    prefill_case(256, torch.bfloat16, HALF),
    prefill_case(128, torch.float32, FLOAT),
    *(Case(block_copies._copy_words, WORDS, {"IS_GATHER": is_gather, "WORDS": 1024}) for is_gather in (True, False)),
    Case(row_digests._sum_rounds, DIGESTED | {"width": "i32", "num_sums": "i32", "num_words": "i32"}, {"ROUNDS": 8}),
    Case(row_digests._mix_rounds, {"sums": LONG, "keys": LONG, "first": LONG, "out": LONG, "num_rounds": "i32"}, {}),
    *(Case(kernel, ROUNDED | ROW_SIZES, SLOTS) for kernel in (int8_blocks._quantise, int8_blocks._dequantise)),
    *(
        Case(
            row_norm._normalise,
            NORM,
            {"HAS_RESIDUAL": is_rms, "HAS_BIAS": not is_rms, "IS_RMS": is_rms, "PADDED_WIDTH": 4096},
            {"num_warps": row_warps(4096)},
        )
        for is_rms in (True, False)
    ),
    *(
        Case(
            head_placement._place,
            PLACED,
            {"NUM_HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "FIRST": 64, "HALF": half, "HAS_NORM": half > 0}
            | {"PART": 64, "HEADS": 8},
        )
        for half in (64, 0)
    ),
    *(Case(gating._gate, GATED, {"ACTIVATION": name, "COLUMNS": 1024}) for name in gating.NAMES),
    # The widest tile takes as long as all other kernels together.
    *(
        Case(token_sampling._sample, {**SAMPLED, "logits": kind}, {"TILE": tile}, {"num_warps": token_sampling._WARPS})
        for kind, tile in ((HALF, 512), (HALF, 4096), (FLOAT, 4096))
    ),
]


def main() -> None:
    """Compile every kernel in every variant."""
    for kernel, types, constants, options, side_by_side in CASES:
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        sizes = [name.startswith("*") or name in ("i32", "i64") for name in signature.values()]
        divisible = {
            (place,): [["tt.divisibility", 16]]
            for place, (name, is_size) in enumerate(zip(signature, sizes, strict=True))
            if is_size and name not in _NOT_SIZES
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        num_registers, stack_bytes = usage(compiled.asm["cubin"])
        print(
            f"{kernel.__name__}: {compiled.metadata.shared} bytes of shared memory, {num_registers} registers and "
            f"{stack_bytes} bytes of stack a thread"
        )
        assert stack_bytes <= _MOST_STACK_BYTES, kernel.__name__
        own_registers = compiled.metadata.num_warps * 32 * -(-num_registers // 8) * 8
        assert side_by_side * own_registers <= _REGISTERS, "more programs than registers hold"
        own_bytes = compiled.metadata.shared + _OWN_SHARED_BYTES
        assert side_by_side * own_bytes <= _SHARED_BYTES, "more programs than shared memory holds"


def usage(cubin: bytes) -> tuple[int, int]:
    """Return a thread's registers, and bytes of stack where they were too few."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    main()
