"""Compiles every GPU kernel to machine code for compute capability 9.0, as for an 8B Llama in bfloat16: no GPU needed.

    python -m tests.gpu_kernels.compile_all          # in every variant
    python -m tests.gpu_kernels.compile_all --once   # the first variant of each

Without TRITON_INTERPRET, so in a process of its own. Prints a line per kernel; a kernel that does not compile raises.
"""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.gpu import (
    block_copies,
    decode_attention,
    gating,
    head_placement,
    hidden_cache,
    int8_blocks,
    prefill_attention,
    row_checksums,
    row_norm,
    token_sampling,
)

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
LAYER = {
    "norm_weight": HALF,
    "norm_bias": HALF,
    "weight": HALF,
    "bias": HALF,
    "cos": FLOAT,
    "sin": FLOAT,
    "hidden_size": "i32",
    "eps": "fp32",
}
HIDDEN = {
    "blocks": HALF,
    "table": LONG,
    "keys": HALF,
    "values": HALF,
    "num_tokens": "i32",
    "block_stride": "i64",
    **LAYER,
}
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
SLOTS = {"SLOTS": 16, "PADDED": 16, "CHANNELS": 128}

# Kernel, types of its arguments, what it is compiled for.
CASES: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
    (decode_attention._decode_parts, {**ATTENTION, **PARTS}, {**TILE, "PADDED_GROUP": 16}),
    (decode_attention._merge_parts, MERGED, {"PADDED_GROUP": 16, "PADDED_DIM": 128, **HEADS}),
    (prefill_attention._prefill, {**ATTENTION, **TILES}, {**TILE, "PADDED_GROUP": 4, "ROWS": 64}),
    *((block_copies._copy_words, WORDS, {"IS_GATHER": is_gather, "WORDS": 1024}) for is_gather in (True, False)),
    (row_checksums._sum_words, {"rows": LONG, "keys": LONG, "sums": LONG, "num_words": "i32"}, {"WORDS": 2048}),
    *((kernel, ROUNDED | ROW_SIZES, SLOTS) for kernel in (int8_blocks._quantise, int8_blocks._dequantise)),
    *(
        (
            hidden_cache._recompute,
            HIDDEN,
            {"KV_HEADS": 8, "HEAD_DIM": 128, "FIRST": 64, "HALF": half, "BLOCK_SIZE": 16, "PART": 64}
            | {"IS_RMS": is_rms, "HAS_BIAS": not is_rms, "TOKENS": 32, "INPUTS": 64, "UPCAST": False},
        )
        for half, is_rms in ((64, True), (0, False))
    ),
    *(
        (
            row_norm._normalise,
            NORM,
            {"HAS_RESIDUAL": is_rms, "HAS_BIAS": not is_rms, "IS_RMS": is_rms, "PADDED_WIDTH": 4096},
        )
        for is_rms in (True, False)
    ),
    *(
        (
            head_placement._place,
            PLACED,
            {"NUM_HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "FIRST": 64, "HALF": half, "HAS_NORM": half > 0}
            | {"PART": 64, "HEADS": 8},
        )
        for half in (64, 0)
    ),
    *((gating._gate, GATED, {"ACTIVATION": name, "COLUMNS": 1024}) for name in gating.NAMES),
    # The widest tile takes as long as all other kernels together.
    *(
        (token_sampling._sample, {**SAMPLED, "logits": kind}, {"TILE": tile})
        for kind, tile in ((HALF, 512), (HALF, 4096), (FLOAT, 4096))
    ),
]


def main(*, once: bool) -> None:
    """Compile all, or each kernel once."""
    seen: set[str] = set()
    for kernel, types, constants in CASES:
        if once and kernel.__name__ in seen:
            continue
        seen.add(kernel.__name__)
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        assert compiled.asm["cubin"], kernel.__name__
        print(f"{kernel.__name__}: {compiled.metadata.shared} bytes of shared memory")


if __name__ == "__main__":
    main(once="--once" in sys.argv)
