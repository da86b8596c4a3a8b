"""Reads how a model sees from config.json and from the files of its processor: a row of the table for each family."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from alignedserve.core.errors import UnsupportedModel
from alignedserve.core.json_fields import JsonFields, read_json_object
from alignedserve.runtime.model.decoder.decoder_parts import Activation, NormKind
from alignedserve.runtime.model.hf_fields import MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH, read_activation
from plugins.vision.forms import BudgetForm, CanvasForm, RowsForm, Scaling, SquareForm, TiledForm
from plugins.vision.mobile_config import SeeingConfig, read_mobile
from plugins.vision.qwen_fields import read_qwen2_5, read_qwen3
from plugins.vision.tower_fields import (
    CLIP,
    HALVES,
    MAX_CELLS,
    MAX_EDGE,
    MAX_FILE_BYTES,
    check_square,
    image_token,
    longest_edge,
    processor_of,
    read_scaling,
    section_of,
    tower_sizes,
)
from plugins.vision.vision_config import NAMES, PositionKind, VisionConfig

_MAX_TILES = 256  # of one picture, however wide or high it is
_ALWAYS = ("do_resize", "do_rescale", "do_normalize")
_UNNORMALISED = ("gemma3n", "gemma4")  # by their processors, or as these say

# Of the model's fields and those of its processor of images; None: it does not see.
Reader = Callable[[JsonFields, JsonFields], SeeingConfig | None]


def read_vision(folder: Path, family: str) -> SeeingConfig | None:
    """Read how the model in the folder sees; None: it does not, or not in a way that is read here.

    Raises ModelError naming the field, UnsupportedModel naming what is not supported.
    """
    reader = VISION_FAMILIES.get(family)
    if reader is None:
        return None
    path = folder / "config.json"
    fields, images = JsonFields(read_json_object(path, MAX_FILE_BYTES), str(path)), processor_of(folder)
    for name in _ALWAYS[: 2 if family in _UNNORMALISED else 3]:
        if not images.flag(name, True):
            raise UnsupportedModel(f"{images.where}: {name}=false is not supported.")
    return reader(fields, images)


def _idefics3(fields: JsonFields, images: JsonFields) -> VisionConfig:
    tower = section_of(fields, "vision_config")
    sizes = tower_sizes(fields, tower, (1152, 3072, 12, 16, 32), "gelu_pytorch_tanh")
    patch = sizes["patch_size"]
    num_sides = tower.integer("image_size", patch, MAX_EDGE, 224) // patch
    join = fields.integer("scale_factor", 1, num_sides, 2)
    edge, longest = longest_edge(images, "max_image_size", 364), longest_edge(images, "size", 4 * 364)
    if edge // patch != num_sides or num_sides % join:
        raise images.error("max_image_size", f"must be {num_sides} patches of {patch}, divided by scale_factor")
    if (-(-longest // edge)) ** 2 > _MAX_TILES:
        raise UnsupportedModel(f"{images.where}: more than {_MAX_TILES} tiles of a picture are not supported.")
    form = TiledForm(
        token_id=fields.integer("image_token_id", 0, MAX_VOCABULARY, 128257),
        tile_edge=edge,
        longest_edge=longest,
        tile_tokens=(num_sides // join) ** 2,
        scaling=read_scaling(images, (HALVES, HALVES)),
        resample=images.integer("resample", 0, 5, 1),
        is_cut=images.flag("do_image_splitting", True),
    )
    return VisionConfig(
        **sizes,
        form=form,
        names=NAMES["idefics3"],
        norm=NormKind.LAYER,
        norm_eps=tower.number("layer_norm_eps", 0.0, 1.0, 1e-6),
        has_patch_bias=True,
        has_bias=True,
        is_gated=False,
        num_sides=num_sides,
        rope_theta=None,
        join=join,
        joins_channels=False,
    )


def _pixtral(fields: JsonFields, images: JsonFields) -> VisionConfig:
    tower = section_of(fields, "vision_config")
    if tower.text("model_type", "pixtral") != "pixtral":
        raise UnsupportedModel(f"{tower.where}: a tower other than pixtral is not supported.")
    if fields.integer("vision_feature_layer", -MAX_LAYERS, MAX_LAYERS, -1) != -1:
        raise UnsupportedModel(f"{fields.where}: vision_feature_layer other than -1 is not supported.")
    is_joined = fields.text("model_type") == "mistral3"
    if not is_joined and fields.text("vision_feature_select_strategy", "default") != "full":
        raise UnsupportedModel(f"{fields.where}: vision_feature_select_strategy other than full is not supported.")
    sizes = tower_sizes(fields, tower, (1024, 4096, 24, 16, 16), "gelu")
    join = fields.integer("spatial_merge_size", 1, 16, 2) if is_joined else 1
    if (sizes["hidden_size"] // sizes["num_heads"]) % 4:
        raise tower.error("num_attention_heads", "must leave heads of whole fours")
    longest = longest_edge(images, "size", 1024)
    cell = sizes["patch_size"] * join
    if (longest // cell) ** 2 > MAX_CELLS:
        raise UnsupportedModel(f"{images.where}: more than {MAX_CELLS} tokens of a picture are not supported.")
    ropes = tower.section("rope_parameters")
    form = RowsForm(
        token_id=fields.integer(image_token(fields), 0, MAX_VOCABULARY, 10),
        cell_edge=cell,
        longest_edge=longest,
        scaling=read_scaling(images, CLIP),
        resample=images.integer("resample", 0, 5, 3),
    )
    return VisionConfig(
        **sizes,
        form=form,
        names=NAMES["mistral3"] if is_joined else NAMES["pixtral"],
        norm=NormKind.RMS,
        norm_eps=1e-5,
        has_patch_bias=False,
        has_bias=False,
        is_gated=True,
        num_sides=None,
        rope_theta=(tower if ropes is None else ropes).number("rope_theta", 1.0, 1e12, 1e4),
        join=join,
        joins_channels=True,
        connector_activation=read_activation(fields, "projector_hidden_act", "gelu"),
        has_connector_bias=fields.flag("multimodal_projector_bias", not is_joined),
        connector_eps=section_of(fields, "text_config").number("rms_norm_eps", 0.0, 1.0, 1e-6),
    )


def _llama4(fields: JsonFields, images: JsonFields) -> VisionConfig | None:
    tower = fields.section("vision_config")
    if tower is None:
        return None
    if tower.text("vision_feature_select_strategy", "default") != "default":
        raise UnsupportedModel(f"{tower.where}: vision_feature_select_strategy other than default is not supported.")
    if tower.flag("multi_modal_projector_bias", False):
        raise UnsupportedModel(f"{tower.where}: multi_modal_projector_bias is not supported.")
    sizes = tower_sizes(fields, tower, (768, 5632, 34, 16, 14), "gelu")
    edge, patch = tower.integer("image_size", sizes["patch_size"], MAX_EDGE, 448), sizes["patch_size"]
    join = round(1.0 / tower.number("pixel_shuffle_ratio", 1 / 16, 1.0, 0.5))
    width = tower.integer("projector_input_dim", 1, MAX_WIDTH, 4096)
    for name, expected in (
        ("intermediate_size", sizes["hidden_size"] * join**2),  # the adapter is as wide
        ("projector_output_dim", width),
        ("vision_output_dim", width),
    ):
        if tower.integer(name, 1, MAX_WIDTH, expected) != expected:
            raise tower.error(name, f"must be {expected}, as the adapter's other widths are")
    if edge % (patch * join) or (sizes["hidden_size"] // sizes["num_heads"]) % 4:
        raise tower.error("image_size", "must be whole squares of joined patches, and heads whole fours")
    check_square(images, edge)
    scaling = read_scaling(images, (HALVES, HALVES))
    form = CanvasForm(
        token_id=fields.integer(image_token(fields), 0, MAX_VOCABULARY, 200092),
        tile_edge=edge,
        max_tiles=images.integer("max_patches", 1, _MAX_TILES, 16),
        tile_tokens=(edge // patch // join) ** 2,
        scaling=Scaling(scaling.rescale, scaling.mean, scaling.deviation, is_short=True),
        resample=images.integer("resample", 0, 5, 2),
        is_enlarged=images.flag("resize_to_max_canvas", False),
    )
    return VisionConfig(
        **sizes,
        form=form,
        names=NAMES["llama4"],
        norm=NormKind.LAYER,
        norm_eps=1e-5,
        has_patch_bias=False,
        has_bias=True,
        is_gated=False,
        num_sides=edge // patch,
        positions=PositionKind.EACH,
        rope_theta=(tower.section("rope_parameters") or tower).number("rope_theta", 1.0, 1e12, 1e4),
        join=join,
        joins_channels=False,
        connector_activation=Activation.GELU,
        connector_width=width,
        shares_frequencies=True,
        first_place=1,
    )


def _gemma3(fields: JsonFields, images: JsonFields) -> VisionConfig | None:
    tower = fields.section("vision_config")
    if tower is None:
        return None
    if tower.text("model_type", "siglip_vision_model") != "siglip_vision_model":
        raise UnsupportedModel(f"{tower.where}: a tower other than siglip_vision_model is not supported.")
    if images.flag("do_pan_and_scan", False):  # pictures would be seen in parts
        return None
    sizes = tower_sizes(fields, tower, (768, 3072, 12, 12, 16), "gelu_pytorch_tanh")
    edge = tower.integer("image_size", sizes["patch_size"], MAX_EDGE, 224)
    num_sides, num_tokens = edge // sizes["patch_size"], fields.integer("mm_tokens_per_image", 1, MAX_CELLS, 256)
    sides = math.isqrt(num_tokens)
    if sides**2 != num_tokens or num_sides % sides:
        raise fields.error("mm_tokens_per_image", f"must be a square whose side divides {num_sides}")
    check_square(images, edge)
    return VisionConfig(
        **sizes,
        form=SquareForm(
            token_id=fields.integer(image_token(fields), 0, MAX_VOCABULARY, 262144),
            edge=edge,
            tokens=num_tokens,
            scaling=read_scaling(images, (HALVES, HALVES)),
            resample=images.integer("resample", 0, 5, 2),
        ),
        names=NAMES["gemma"],
        norm=NormKind.LAYER,
        norm_eps=tower.number("layer_norm_eps", 0.0, 1.0, 1e-6),
        has_patch_bias=True,
        has_bias=True,
        is_gated=False,
        num_sides=num_sides,
        positions=PositionKind.EACH,
        rope_theta=None,
        join=num_sides // sides,
        joins_channels=False,
        is_pooled=True,
        norms_joined=True,
        connector_norm=NormKind.RMS_PLUS_ONE,
        connector_eps=tower.number("layer_norm_eps", 0.0, 1.0, 1e-6),
    )


def _gemma4(fields: JsonFields, images: JsonFields) -> VisionConfig | None:
    """Read Gemma 4's tower; there are checkpoints of the text part alone.

    Pictures of more tokens than a window are not seen where their tokens read one another.
    """
    tower, text = fields.section("vision_config"), section_of(fields, "text_config")
    if tower is None:
        return None
    tower = tower.with_defaults({"hidden_act": tower.text("hidden_activation", "gelu_pytorch_tanh")})
    ropes = section_of(tower, "rope_parameters")
    if ropes.text("rope_type", "axial") != "axial":
        raise UnsupportedModel(f"{ropes.where}: rope_type other than axial is not supported.")
    sizes = tower_sizes(fields, tower, (768, 3072, 16, 12, 16), "gelu_pytorch_tanh")
    width, num_heads, patch = sizes["hidden_size"], sizes["num_heads"], sizes["patch_size"]
    join = tower.integer("pooling_kernel_size", 1, 16, 3)
    for section, name, expected in (
        (tower, "num_key_value_heads", num_heads),
        (tower, "head_dim", width // num_heads),
        (images, "patch_size", patch),
        (images, "pooling_kernel_size", join),
    ):
        if section.integer(name, 1, MAX_WIDTH, expected) != expected:
            raise UnsupportedModel(f"{section.where}: {name} other than {expected} is not supported.")
    if (width // num_heads) % 4:
        raise tower.error("num_attention_heads", "must leave heads of whole fours")
    most = images.integer("max_soft_tokens", 1, MAX_CELLS, 280)
    is_whole = text.has("use_bidirectional_attention")
    if is_whole and most > text.integer("sliding_window", 1, MAX_WIDTH, 512):
        return None
    scaling = read_scaling(images, (HALVES, HALVES))
    has_standard = tower.flag("standardize", False)
    return VisionConfig(
        **sizes,
        form=BudgetForm(
            token_id=fields.integer(image_token(fields), 0, MAX_VOCABULARY, 258880),
            cell_edge=patch * join,
            max_tokens=most,
            scaling=Scaling(scaling.rescale, HALVES, HALVES),
            resample=images.integer("resample", 0, 5, 3),
            is_whole=is_whole,
        ),
        names=replace(NAMES["gemma4"], standard=("std_bias", "std_scale") if has_standard else None),
        norm=NormKind.RMS,
        norm_eps=tower.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        has_patch_bias=False,
        has_bias=False,
        is_gated=True,
        num_sides=tower.integer("position_embedding_size", most * join, 1 << 20, 10240),
        positions=PositionKind.AXES,
        rope_theta=ropes.number("rope_theta", 1.0, 1e12, 100.0),
        join=join,
        joins_channels=False,
        is_pooled=True,
        norms_joined=True,
        has_unit_norm=True,
        connector_eps=tower.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        shares_frequencies=True,
        has_head_norms=True,
        score_scale=1.0,
        pooled_scale=math.sqrt(width),
        is_clipped=tower.flag("use_clipped_linears", False),
    )


VISION_FAMILIES: Mapping[str, Reader] = MappingProxyType(
    {
        "idefics3": _idefics3,
        "smolvlm": _idefics3,
        "llava": _pixtral,
        "mistral3": _pixtral,
        "qwen2_5_vl": read_qwen2_5,
        "qwen3_vl": read_qwen3,
        "qwen3_vl_moe": read_qwen3,
        "gemma3": _gemma3,
        "llama4": _llama4,
        "gemma4": _gemma4,
        "gemma3n": read_mobile,
    }
)
