"""The GPU kernels in every variant that `compile_all` compiles: as they are launched for an 8B Llama in bfloat16."""

from typing import Any, NamedTuple

import torch

from kernels.gpu import (
    block_copies,
    decode_attention,
    expert_rows,
    float8_inputs,
    gating,
    grouped_weights,
    head_placement,
    lora,
    prefill_attention,
    row_digests,
    row_norm,
    stacked_weights,
    token_sampling,
)
from kernels.gpu.launching import padded, row_warps


class Case(NamedTuple):
    """A kernel as it is launched."""

    kernel: Any
    types: dict[str, str]  # of its arguments
    constants: dict[str, Any]
    options: dict[str, int] = {}  # noqa: RUF012  (never changed)
    side_by_side: int = 1  # programs that a multiprocessor of compute capability 9.0 must hold

    @property
    def variant(self) -> str:
        """Return what tells it from the others of its kernel."""
        parts = [f"{name} {value}" for name, value in self.constants.items() if name != "KV_HEADS"]
        kinds = {kind for kind in self.types.values() if kind.startswith("*")} & {HALF, FLOAT, "*u8"}
        return ", ".join((*sorted(kinds), *parts, *(f"{name} {value}" for name, value in self.options.items())))


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
WORDS = dict.fromkeys(("source", "source_ids", "target", "target_ids"), LONG)
WORDS |= dict.fromkeys(("num_parts", "parts_per_block", "num_words"), "i32")
NORM = {
    "x": HALF,
    "residual": HALF,
    "weight": HALF,
    "bias": HALF,
    "out": HALF,
    "values": "*u8",
    "scales": FLOAT,
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
GATED = {"x": HALF, "out": HALF, "values": "*u8", "scales": FLOAT, "stride": "i64", "width": "i32"}
ROUNDED_INPUTS = {"x": HALF, "values": "*u8", "scales": FLOAT, "x_stride": "i64", "width": "i32"}
SAMPLED = {
    "temperatures": FLOAT,
    "top_ks": LONG,
    "top_ps": FLOAT,
    "min_ps": FLOAT,
    "draws": "*fp64",
    "token_ids": LONG,
    "is_usable": "*u8",
    "aside_ids": INT,
    "logits_stride": "i64",
    "vocabulary": "i32",
    "most_aside": "i32",
}
ADAPTED = {
    "x": HALF,
    "product": HALF,
    "sums": FLOAT,
    "places": LONG,
    "tiles": LONG,
    "site": "i32",
    "in_width": "i32",
    "x_stride": "i64",
    "product_stride": "i64",
    "run_stride": "i64",
    "run_width": "i32",
    "num_runs": "i32",
    "num_ranks": "i32",
}
TILE = {"BLOCK_SIZE": 16, "PADDED_DIM": 128, "TOKENS": 64, "UPCAST": False, **HEADS}
DIGESTED = {"words": LONG, "keys": LONG, "sums": LONG}

STACKED = {
    "x": HALF,
    "weight": HALF,
    "ends": INT,
    "out": HALF,
    "num_experts": "i32",
    "columns": "i32",
    "width": "i32",
    "x_stride": "i64",
}
ROUTED = {"experts": INT, "shares": FLOAT, "num_experts": "i32", "num_chosen": "i32"}
SORTED = {"experts": INT, "rows": INT, "places": INT, "ends": INT, "num_choices": "i32", "num_chosen": "i32"}
ADDED_UP = {"results": HALF, "places": INT, "shares": FLOAT, "out": HALF}
GROUPED = {
    "x": HALF,
    "words": "*u8",
    "scales": FLOAT,
    "zeros": "*u8",
    "out": FLOAT,
    "ends": INT,
    "num_rows": "i32",
    "num_experts": "i32",
    "columns": "i32",
    "num_groups": "i32",
    "run_groups": "i32",
    "x_stride": "i64",
}


class Gpu(NamedTuple):
    """What launches depend on."""

    shared_bytes: int  # that a program may have
    converts_float8: bool


def slots(head_dim: int, dtype: torch.dtype, gpu: Gpu) -> dict[str, int | bool]:
    """Return the constants of the slots of a cache of this dtype; uint8: of FP8."""
    has_scales = dtype == torch.uint8
    width = HEADS["KV_HEADS"] * (head_dim + 4 * has_scales)
    return {
        "SLOT_WIDTH": width,
        "HAS_SCALES": has_scales,
        "CONVERTS_FLOAT8": has_scales and gpu.converts_float8,
    }


def decode_case(head_dim: int, dtype: torch.dtype, element: str, gpu: Gpu, side_by_side: int) -> Case:
    """As `paged_decode` launches it; `element` of queries."""
    cached = "*u8" if dtype == torch.uint8 else element
    types = {**ATTENTION, **PARTS, "queries": element, "blocks": cached}
    sizes = {"HEAD_DIM": head_dim, "PADDED_DIM": padded(head_dim), "PADDED_GROUP": 16}
    constants = {**TILE, **sizes, **slots(head_dim, dtype, gpu)}
    _, num_warps, num_stages = decode_attention.decode_tiling(head_dim, dtype, gpu.shared_bytes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return Case(decode_attention._decode_parts, types, constants, options, side_by_side)


def prefill_case(head_dim: int, dtype: torch.dtype, element: str, gpu: Gpu) -> Case:
    """As `paged_prefill` launches it; `element` of queries."""
    tiling = prefill_attention.tiling(head_dim, dtype, gpu.shared_bytes)
    sizes = {"HEAD_DIM": head_dim, "PADDED_DIM": padded(head_dim), "ROWS": tiling.query_rows, "TOKENS": tiling.keys}
    cached = "*u8" if dtype == torch.uint8 else element
    types = {**ATTENTION, **TILES, "queries": element, "blocks": cached, "out": element}
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    return Case(
        prefill_attention._prefill, types, {**TILE, **sizes, **slots(head_dim, dtype, gpu), "PADDED_GROUP": 4}, options
    )


def cases(gpu: Gpu) -> list[Case]:
    """Return every kernel in every variant for a kind of GPU."""
    return [
        decode_case(64, torch.bfloat16, HALF, gpu, 4),
        decode_case(128, torch.bfloat16, HALF, gpu, 3),
        decode_case(256, torch.bfloat16, HALF, gpu, 2),
        decode_case(128, torch.uint8, HALF, gpu, 2),
        decode_case(128, torch.float32, FLOAT, gpu, 2),
        Case(decode_attention._merge_parts, MERGED, {"HEADS": 32, "HEAD_DIM": 128, "PADDED_DIM": 128, "PARTS": 16}),
        prefill_case(128, torch.bfloat16, HALF, gpu),
        prefill_case(256, torch.bfloat16, HALF, gpu),
        prefill_case(128, torch.uint8, HALF, gpu),
        prefill_case(128, torch.float32, FLOAT, gpu),
        *(
            Case(block_copies._copy_words, WORDS, {"READS_LISTED": reads, "WRITES_LISTED": writes, "WORDS": 1024})
            for reads, writes in ((True, False), (False, True), (True, True))
        ),
        *(
            Case(
                row_digests._sum_rounds,
                DIGESTED | {"row_ids": LONG, "width": "i32", "num_sums": "i32", "num_words": "i32"},
                {"ROUNDS": 8, "IS_LISTED": is_listed},
            )
            for is_listed in (False, True)
        ),
        Case(
            row_digests._mix_rounds, {"sums": LONG, "keys": LONG, "first": LONG, "out": LONG, "num_rounds": "i32"}, {}
        ),
        *(
            Case(kernel, ADAPTED, {"ROWS": rows, "RANKS": lora.RANKS, **sizes})
            for rows in (16, 64)
            for kernel, sizes in ((lora._shrink, {"INPUTS": 64}), (lora._expand, {"COLUMNS": 64}))
        ),
        *(
            Case(
                grouped_weights._multiply,
                GROUPED | {"zeros": FLOAT if form == "IS_FLOAT8" else "*u8"},
                {"IS_INT4": False, "IS_FLOAT8": False, "EXPERTS": experts, "UPCAST": False}
                | {"GROUP": group, "ROWS": rows, "COLUMNS": 64}
                | ({} if form == "INT8" else {form: True}),
            )
            for form, group, rows, experts in (
                ("IS_INT4", 128, 16, 0),
                ("IS_INT4", 128, 64, 0),
                ("IS_INT4", 32, 16, 0),
                ("IS_INT4", 128, 64, 128),
                ("IS_FLOAT8", 128, 16, 0),
                ("IS_FLOAT8", 128, 64, 0),
                ("IS_FLOAT8", 128, 64, 128),
                ("INT8", 128, 64, 0),
            )
        ),
        *(
            Case(
                stacked_weights._multiply_stacked,
                STACKED,
                {"ROWS": rows, "COLUMNS": columns, "INPUTS": 64, "EXPERTS": 128, "UPCAST": False},
                {"num_stages": stacked_weights._STAGES},
            )
            for rows, columns in ((16, 64), (64, 128))
        ),
        Case(expert_rows._choose, {"logits": FLOAT, **ROUTED}, {"NORMALISES": True, "EXPERTS": 128}, {"num_warps": 2}),
        *(
            Case(expert_rows._sort, SORTED, {"CHOICES": choices}, {"num_warps": warps})
            for choices, warps in ((1024, 4), (4096, 8))
        ),
        Case(
            expert_rows._add_up,
            ADDED_UP | {"stride": "i64", "width": "i32", "num_chosen": "i32"},
            {"COLUMNS": 1024},
        ),
        *(
            Case(
                row_norm._normalise,
                NORM,
                {
                    "HAS_RESIDUAL": is_rms,
                    "HAS_BIAS": not is_rms,
                    "IS_RMS": is_rms,
                    "ROUNDS": rounds,
                    "PADDED_WIDTH": 4096,
                },
                {"num_warps": row_warps(4096)},
            )
            for is_rms, rounds in ((True, False), (False, False), (True, True))
        ),
        *(
            Case(
                float8_inputs._round_rows,
                ROUNDED_INPUTS,
                {"IS_WHOLE": is_whole, "TILE": tile},
                {"num_warps": row_warps(tile)},
            )
            for is_whole, tile in ((True, 4096), (False, float8_inputs.MOST_ELEMENTS))
        ),
        *(
            Case(
                head_placement._place,
                PLACED | {"keys": cached, "values": cached},
                {"NUM_HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "FIRST": 64, "HALF": half, "HAS_NORM": half > 0}
                | {"PART": 64, "HEADS": 8, "IS_FLOAT8": cached == "*u8"},
            )
            for half, cached in ((64, HALF), (0, HALF), (64, "*u8"))
        ),
        *(Case(gating._gate, GATED, {"ACTIVATION": name, "ROUNDS": False, "COLUMNS": 1024}) for name in gating.NAMES),
        Case(
            gating._gate,
            GATED,
            {"ACTIVATION": "silu", "ROUNDS": True, "COLUMNS": float8_inputs.MOST_ELEMENTS},
            {"num_warps": row_warps(float8_inputs.MOST_ELEMENTS)},
        ),
        # The widest tile takes as long as all other kernels together.
        *(
            Case(
                token_sampling._sample,
                {**SAMPLED, "logits": kind, "aside": kind},
                {"TILE": tile},
                {"num_warps": token_sampling._WARPS},
            )
            for kind, tile in ((HALF, 512), (HALF, 2048), (FLOAT, 2048))
        ),
    ]
