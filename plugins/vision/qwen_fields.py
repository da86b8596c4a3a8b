"""Reads how Qwen2.5-VL and Qwen3-VL see: towers of one kind, whose joined patches are the cells of a picture."""

import math

import msgspec

from alignedserve.core.json_fields import JsonFields
from alignedserve.runtime.model.decoder.decoder_parts import Activation, NormKind
from alignedserve.runtime.model.hf_fields import MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH
from plugins.vision.forms import CellsForm
from plugins.vision.tower_fields import CLIP, MAX_EDGE, TowerSizes, pixel_bounds, read_scaling, section_of, tower_sizes
from plugins.vision.vision_config import NAMES, PositionKind, VisionConfig


def _cells(fields: JsonFields, images: JsonFields, tower: JsonFields, sizes: TowerSizes) -> CellsForm:
    if (sizes["hidden_size"] // sizes["num_heads"]) % 4:
        raise tower.error("num_heads", "must leave heads of whole fours")
    join, patch = tower.integer("spatial_merge_size", 1, 16, 2), sizes["patch_size"]
    for name, expected in (("patch_size", patch), ("merge_size", join)):
        if images.integer(name, 1, MAX_EDGE, expected) != expected:
            raise images.error(name, f"must be that of the encoder, {expected}")
    if tower.integer("out_hidden_size", 1, MAX_WIDTH, 3584) != sizes["out_width"]:
        raise tower.error("out_hidden_size", "must be the text's hidden_size")
    cell = patch * join
    least, most = pixel_bounds(images, cell)
    return CellsForm(
        token_id=fields.integer("image_token_id", 0, MAX_VOCABULARY, 151655),
        cell_edge=cell,
        min_pixels=least,
        max_pixels=most,
        scaling=read_scaling(images, CLIP),
        resample=images.integer("resample", 0, 5, 3),
    )


def _qwen(fields: JsonFields, images: JsonFields, defaults: tuple[int, int, int, int, int], act: str) -> VisionConfig:
    tower = section_of(fields, "vision_config")
    sizes = tower_sizes(fields, tower, defaults, act)
    form = _cells(fields, images, tower, sizes)
    join = form.cell_edge // sizes["patch_size"]
    return VisionConfig(
        **sizes,
        form=form,
        names=NAMES["qwen"],
        norm=NormKind.RMS,
        norm_eps=1e-6,
        has_patch_bias=False,
        has_bias=True,
        is_gated=True,
        num_sides=None,
        rope_theta=(tower.section("rope_parameters") or tower).number("rope_theta", 1.0, 1e12, 1e4),
        join=join,
        joins_channels=False,
        connector_activation=Activation.GELU,
        has_connector_bias=True,
        connector_eps=1e-6,
        connector_width=sizes["hidden_size"] * join**2,
        num_frames=tower.integer("temporal_patch_size", 1, 16, 2),
        shares_frequencies=True,
    )


def read_qwen2_5(fields: JsonFields, images: JsonFields) -> VisionConfig:
    config = _qwen(fields, images, (3584, 3420, 32, 16, 14), "silu")
    tower, cell = section_of(fields, "vision_config"), config.patch_size * config.join
    return msgspec.structs.replace(
        config,
        window_edge=tower.integer("window_size", cell, MAX_EDGE, 112) // cell * config.join,
        full_layers=tower.integers("fullatt_block_indexes", 0, MAX_LAYERS) or (7, 15, 23, 31),
    )


def read_qwen3(fields: JsonFields, images: JsonFields) -> VisionConfig:
    """Read Qwen3-VL's tower: no windows, a table of positions, and inner layers that add to the text's first ones."""
    config = _qwen(fields, images, (1152, 4304, 27, 16, 16), "gelu_pytorch_tanh")
    tower, deep_name = section_of(fields, "vision_config"), "deepstack_visual_indexes"
    num_positions = tower.integer("num_position_embeddings", 1, 1 << 20, 2304)
    deep_layers = tower.integers(deep_name, 0, MAX_LAYERS) if tower.has(deep_name) else (8, 16, 24)
    if math.isqrt(num_positions) ** 2 != num_positions:
        raise tower.error("num_position_embeddings", "must be a square")
    if len(set(deep_layers)) < len(deep_layers) or max(deep_layers, default=0) >= config.num_layers:
        raise tower.error(deep_name, "must be layers of the encoder, each once")
    if len(deep_layers) >= section_of(fields, "text_config").integer("num_hidden_layers", 1, MAX_LAYERS, MAX_LAYERS):
        raise tower.error(deep_name, "must be fewer than the text has layers")
    return msgspec.structs.replace(
        config,
        names=NAMES["qwen3"],
        norm=NormKind.LAYER,
        has_patch_bias=True,
        is_gated=False,
        num_sides=math.isqrt(num_positions),
        positions=PositionKind.BETWEEN,
        connector_norm=NormKind.LAYER,
        deep_layers=deep_layers,
    )
