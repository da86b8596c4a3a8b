"""Reads how a model sees from config.json and from the files of its processor: a row of the table for each family."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypedDict

from alignedserve.core.errors import UnsupportedModel
from alignedserve.core.json_fields import JsonFields, read_json_object
from alignedserve.pictures.form import CHANNELS, CellsForm, Rgb, RowsForm, Scaling, SquareForm, TiledForm
from alignedserve.runtime.model.hf_fields import MAX_HEADS, MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH, read_activation
from alignedserve.runtime.model.model_config import Activation, NormKind
from alignedserve.runtime.model.vision import names
from alignedserve.runtime.model.vision.vision_config import PositionKind, VisionConfig

_MAX_FILE_BYTES = 1 << 20
_MAX_EDGE = 1 << 13
_MAX_TILES = 256  # of one picture, however wide or high it is
_MAX_CELLS = 16384
_PROCESSOR, _IMAGES = "processor_config.json", "preprocessor_config.json"
_ALWAYS = ("do_resize", "do_rescale", "do_normalize")

_HALVES: Rgb = (0.5, 0.5, 0.5)
_CLIP: tuple[Rgb, Rgb] = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))  # mean, deviation

# Of the model's fields and those of its processor of images; None: it does not see.
Reader = Callable[[JsonFields, JsonFields], VisionConfig | None]


def read_vision(folder: Path, family: str) -> VisionConfig | None:
    """Read how the model in the folder sees; None: it does not, or not in a way that is read here.

    Raises ModelError naming the field, UnsupportedModel naming what is not supported.
    """
    reader = VISION_FAMILIES.get(family)
    if reader is None:
        return None
    path = folder / "config.json"
    fields, images = JsonFields(read_json_object(path, _MAX_FILE_BYTES), str(path)), _processor(folder)
    for name in _ALWAYS:
        if not images.flag(name, True):
            raise UnsupportedModel(f"{images.where}: {name}=false is not supported.")
    return reader(fields, images)


def _processor(folder: Path) -> JsonFields:
    """Return the fields of the processor of images, whichever file has them; none are needed."""
    path = folder / _PROCESSOR
    if path.exists():
        inner = JsonFields(read_json_object(path, _MAX_FILE_BYTES), str(path)).section("image_processor")
        if inner is not None:
            return inner
    path = folder / _IMAGES
    return JsonFields(read_json_object(path, _MAX_FILE_BYTES) if path.exists() else {}, str(path))


class _Sizes(TypedDict):
    """The sizes that every tower has, as arguments of VisionConfig."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    activation: Activation
    out_width: int


def _sizes(fields: JsonFields, tower: JsonFields, defaults: tuple[int, int, int, int, int], activation: str) -> _Sizes:
    """Return the sizes; `defaults`: of width, inner width, layers, heads and patches."""
    width = tower.integer("hidden_size", 1, MAX_WIDTH, defaults[0])
    heads, layers = ("num_heads", "depth") if tower.has("depth") else ("num_attention_heads", "num_hidden_layers")
    num_heads = tower.integer(heads, 1, MAX_HEADS, defaults[3])
    if width % num_heads:
        raise tower.error("num_attention_heads", "must divide hidden_size")
    for name in ("num_channels", "in_channels", "in_chans"):
        if tower.integer(name, 1, 16, CHANNELS) != CHANNELS:
            raise UnsupportedModel(f"{tower.where}: {name} other than {CHANNELS} are not supported.")
    return {
        "hidden_size": width,
        "intermediate_size": tower.integer("intermediate_size", 1, MAX_WIDTH, defaults[1]),
        "num_layers": tower.integer(layers, 1, MAX_LAYERS, defaults[2]),
        "num_heads": num_heads,
        "patch_size": tower.integer("patch_size", 1, _MAX_EDGE, defaults[4]),
        "activation": read_activation(tower, "hidden_act", activation),
        "out_width": (fields.section("text_config") or fields).integer("hidden_size", 1, MAX_WIDTH),
    }


def _idefics3(fields: JsonFields, images: JsonFields) -> VisionConfig:
    tower = _section(fields, "vision_config")
    sizes = _sizes(fields, tower, (1152, 3072, 12, 16, 32), "gelu_pytorch_tanh")
    patch = sizes["patch_size"]
    num_sides = tower.integer("image_size", patch, _MAX_EDGE, 224) // patch
    join = fields.integer("scale_factor", 1, num_sides, 2)
    edge, longest = _longest_edge(images, "max_image_size", 364), _longest_edge(images, "size", 4 * 364)
    if edge // patch != num_sides or num_sides % join:
        raise images.error("max_image_size", f"must be {num_sides} patches of {patch}, divided by scale_factor")
    if (-(-longest // edge)) ** 2 > _MAX_TILES:
        raise UnsupportedModel(f"{images.where}: more than {_MAX_TILES} tiles of a picture are not supported.")
    form = TiledForm(
        token_id=fields.integer("image_token_id", 0, MAX_VOCABULARY, 128257),
        tile_edge=edge,
        longest_edge=longest,
        tile_tokens=(num_sides // join) ** 2,
        scaling=_scaling(images, (_HALVES, _HALVES)),
        resample=images.integer("resample", 0, 5, 1),
        is_cut=images.flag("do_image_splitting", True),
    )
    return VisionConfig(
        **sizes,
        form=form,
        names=names.IDEFICS3,
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
    """Read Pixtral's tower, of its own model (`llava`) or of Mistral 3, which joins patches."""
    tower = _section(fields, "vision_config")
    if tower.text("model_type", "pixtral") != "pixtral":
        raise UnsupportedModel(f"{tower.where}: a tower other than pixtral is not supported.")
    if fields.integer("vision_feature_layer", -MAX_LAYERS, MAX_LAYERS, -1) != -1:
        raise UnsupportedModel(f"{fields.where}: vision_feature_layer other than -1 is not supported.")
    is_joined = fields.text("model_type") == "mistral3"
    if not is_joined and fields.text("vision_feature_select_strategy", "default") != "full":
        raise UnsupportedModel(f"{fields.where}: vision_feature_select_strategy other than full is not supported.")
    sizes = _sizes(fields, tower, (1024, 4096, 24, 16, 16), "gelu")
    join = fields.integer("spatial_merge_size", 1, 16, 2) if is_joined else 1
    if (sizes["hidden_size"] // sizes["num_heads"]) % 4:
        raise tower.error("num_attention_heads", "must leave heads of whole fours")
    longest = _longest_edge(images, "size", 1024)
    cell = sizes["patch_size"] * join
    if (longest // cell) ** 2 > _MAX_CELLS:
        raise UnsupportedModel(f"{images.where}: more than {_MAX_CELLS} tokens of a picture are not supported.")
    ropes = tower.section("rope_parameters")
    token_name = "image_token_index" if fields.has("image_token_index") else "image_token_id"
    form = RowsForm(
        token_id=fields.integer(token_name, 0, MAX_VOCABULARY, 10),
        cell_edge=cell,
        longest_edge=longest,
        scaling=_scaling(images, _CLIP),
        resample=images.integer("resample", 0, 5, 3),
    )
    return VisionConfig(
        **sizes,
        form=form,
        names=names.MISTRAL3 if is_joined else names.PIXTRAL,
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
        connector_eps=_section(fields, "text_config").number("rms_norm_eps", 0.0, 1.0, 1e-6),
    )


def _cells(fields: JsonFields, images: JsonFields, tower: JsonFields, sizes: _Sizes) -> CellsForm:
    """Read how Qwen's models see pictures of a size, and check what their parts have to agree on."""
    if (sizes["hidden_size"] // sizes["num_heads"]) % 4:
        raise tower.error("num_heads", "must leave heads of whole fours")
    join, patch = tower.integer("spatial_merge_size", 1, 16, 2), sizes["patch_size"]
    for name, own in (("patch_size", patch), ("merge_size", join)):
        if images.integer(name, 1, _MAX_EDGE, own) != own:
            raise images.error(name, f"must be that of the encoder, {own}")
    if tower.integer("out_hidden_size", 1, MAX_WIDTH, 3584) != sizes["out_width"]:
        raise tower.error("out_hidden_size", "must be the text's hidden_size")
    cell = patch * join
    least, most = _pixels(images, cell)
    return CellsForm(
        token_id=fields.integer("image_token_id", 0, MAX_VOCABULARY, 151655),
        cell_edge=cell,
        min_pixels=least,
        max_pixels=most,
        scaling=_scaling(images, _CLIP),
        resample=images.integer("resample", 0, 5, 3),
    )


def _qwen_vl(fields: JsonFields, images: JsonFields) -> VisionConfig:
    tower = _section(fields, "vision_config")
    sizes = _sizes(fields, tower, (3584, 3420, 32, 16, 14), "silu")
    form = _cells(fields, images, tower, sizes)
    cell, join = form.cell_edge, form.cell_edge // sizes["patch_size"]
    return VisionConfig(
        **sizes,
        form=form,
        names=names.QWEN,
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
        window_edge=tower.integer("window_size", cell, _MAX_EDGE, 112) // cell * join,
        full_layers=tower.integers("fullatt_block_indexes", 0, MAX_LAYERS) or (7, 15, 23, 31),
    )


def _qwen3_vl(fields: JsonFields, images: JsonFields) -> VisionConfig:
    """Read Qwen3-VL's tower: no windows, a table of positions, and inner layers that add to the text's first ones."""
    tower = _section(fields, "vision_config")
    sizes = _sizes(fields, tower, (1152, 4304, 27, 16, 16), "gelu_pytorch_tanh")
    form = _cells(fields, images, tower, sizes)
    join = form.cell_edge // sizes["patch_size"]
    num_positions = tower.integer("num_position_embeddings", 1, 1 << 20, 2304)
    deep_name = "deepstack_visual_indexes"
    deep_layers = tower.integers(deep_name, 0, MAX_LAYERS) if tower.has(deep_name) else (8, 16, 24)
    if math.isqrt(num_positions) ** 2 != num_positions:
        raise tower.error("num_position_embeddings", "must be a square")
    if len(set(deep_layers)) < len(deep_layers) or max(deep_layers, default=0) >= sizes["num_layers"]:
        raise tower.error(deep_name, "must be layers of the encoder, each once")
    if len(deep_layers) >= _section(fields, "text_config").integer("num_hidden_layers", 1, MAX_LAYERS, MAX_LAYERS):
        raise tower.error(deep_name, "must be fewer than the text has layers")
    return VisionConfig(
        **sizes,
        form=form,
        names=names.QWEN3,
        norm=NormKind.LAYER,
        norm_eps=1e-6,
        has_patch_bias=True,
        has_bias=True,
        is_gated=False,
        num_sides=math.isqrt(num_positions),
        positions=PositionKind.BETWEEN,
        rope_theta=(tower.section("rope_parameters") or tower).number("rope_theta", 1.0, 1e12, 1e4),
        join=join,
        joins_channels=False,
        connector_activation=Activation.GELU,
        has_connector_bias=True,
        connector_norm=NormKind.LAYER,
        connector_eps=1e-6,
        connector_width=sizes["hidden_size"] * join**2,
        num_frames=tower.integer("temporal_patch_size", 1, 16, 2),
        shares_frequencies=True,
        deep_layers=deep_layers,
    )


def _gemma3(fields: JsonFields, images: JsonFields) -> VisionConfig | None:
    """Read Gemma 3's tower, which is SigLIP's; there are checkpoints of the text part alone."""
    tower = fields.section("vision_config")
    if tower is None:
        return None
    if tower.text("model_type", "siglip_vision_model") != "siglip_vision_model":
        raise UnsupportedModel(f"{tower.where}: a tower other than siglip_vision_model is not supported.")
    if images.flag("do_pan_and_scan", False):  # pictures would be seen in parts
        return None
    sizes = _sizes(fields, tower, (768, 3072, 12, 12, 16), "gelu_pytorch_tanh")
    edge = tower.integer("image_size", sizes["patch_size"], _MAX_EDGE, 224)
    num_sides, num_tokens = edge // sizes["patch_size"], fields.integer("mm_tokens_per_image", 1, _MAX_CELLS, 256)
    sides = math.isqrt(num_tokens)
    if sides**2 != num_tokens or num_sides % sides:
        raise fields.error("mm_tokens_per_image", f"must be a square whose side divides {num_sides}")
    size = images.section("size") or JsonFields({}, images.where)
    for name in ("height", "width"):
        if size.integer(name, 1, _MAX_EDGE, edge) != edge:
            raise images.error("size", f"must be that of the encoder, {edge} x {edge}")
    token_name = "image_token_index" if fields.has("image_token_index") else "image_token_id"
    return VisionConfig(
        **sizes,
        form=SquareForm(
            token_id=fields.integer(token_name, 0, MAX_VOCABULARY, 262144),
            edge=edge,
            tokens=num_tokens,
            scaling=_scaling(images, (_HALVES, _HALVES)),
            resample=images.integer("resample", 0, 5, 2),
        ),
        names=names.GEMMA,
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


def _pixels(images: JsonFields, cell: int) -> tuple[int, int]:
    """Return the least and the most pixels of a picture, by either generation of their names."""
    size = images.section("size") or JsonFields({}, images.where)
    least = images.integer("min_pixels", 1, 1 << 30, size.integer("shortest_edge", 1, 1 << 30, 56 * 56))
    most = images.integer("max_pixels", 1, 1 << 30, size.integer("longest_edge", 1, 1 << 30, 28 * 28 * 1280))
    if least > most:
        raise images.error("min_pixels", "must not be above max_pixels")
    return least, min(most, _MAX_CELLS * cell**2)


def _section(fields: JsonFields, name: str) -> JsonFields:
    return fields.section(name) or JsonFields({}, f"{fields.where}, {name}")


def _longest_edge(images: JsonFields, name: str, default: int) -> int:
    section = images.section(name)
    return default if section is None else section.integer("longest_edge", 1, _MAX_EDGE)


def _scaling(images: JsonFields, defaults: tuple[Rgb, Rgb]) -> Scaling:
    mean, deviation = defaults
    rescale = images.number("rescale_factor", 0.0, 1e6, 1 / 255)
    return Scaling(rescale, _rgb(images, "image_mean", mean), _rgb(images, "image_std", deviation))


def _rgb(images: JsonFields, name: str, default: Rgb) -> Rgb:
    if not images.has(name):
        return default
    red, green, blue = images.numbers(name, CHANNELS, -1e3, 1e3)
    return red, green, blue


VISION_FAMILIES: Mapping[str, Reader] = MappingProxyType(
    {
        "idefics3": _idefics3,
        "smolvlm": _idefics3,
        "llava": _pixtral,
        "mistral3": _pixtral,
        "qwen2_5_vl": _qwen_vl,
        "qwen3_vl": _qwen3_vl,
        "qwen3_vl_moe": _qwen3_vl,
        "gemma3": _gemma3,
    }
)
