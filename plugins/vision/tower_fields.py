"""Reads the fields that configs of several families that see, and of their processors of images, share."""

from pathlib import Path
from typing import TypedDict

from alignedserve.core.errors import UnsupportedModel
from alignedserve.core.json_fields import JsonFields, read_json_object
from alignedserve.runtime.model.decoder.decoder_parts import Activation
from alignedserve.runtime.model.hf_fields import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, read_activation
from plugins.vision.forms import CHANNELS, Rgb, Scaling

MAX_FILE_BYTES = 1 << 20
MAX_EDGE = 1 << 13
MAX_CELLS = 16384
_PROCESSOR, _IMAGES = "processor_config.json", "preprocessor_config.json"

HALVES: Rgb = (0.5, 0.5, 0.5)
CLIP: tuple[Rgb, Rgb] = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))  # mean, deviation


def processor_of(folder: Path) -> JsonFields:
    """Return the fields of the processor of images, whichever file has them; none are needed."""
    path = folder / _PROCESSOR
    if path.exists():
        inner = JsonFields(read_json_object(path, MAX_FILE_BYTES), str(path)).section("image_processor")
        if inner is not None:
            return inner
    path = folder / _IMAGES
    return JsonFields(read_json_object(path, MAX_FILE_BYTES) if path.exists() else {}, str(path))


class TowerSizes(TypedDict):
    """The sizes that every tower has, as arguments of VisionConfig."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    activation: Activation
    out_width: int


def tower_sizes(
    fields: JsonFields, tower: JsonFields, defaults: tuple[int, int, int, int, int], activation: str
) -> TowerSizes:
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
        "patch_size": tower.integer("patch_size", 1, MAX_EDGE, defaults[4]),
        "activation": read_activation(tower, "hidden_act", activation),
        "out_width": (fields.section("text_config") or fields).integer("hidden_size", 1, MAX_WIDTH),
    }


def pixel_bounds(images: JsonFields, cell: int) -> tuple[int, int]:
    size = images.section("size") or JsonFields({}, images.where)
    least = images.integer("min_pixels", 1, 1 << 30, size.integer("shortest_edge", 1, 1 << 30, 56 * 56))
    most = images.integer("max_pixels", 1, 1 << 30, size.integer("longest_edge", 1, 1 << 30, 28 * 28 * 1280))
    if least > most:
        raise images.error("min_pixels", "must not be above max_pixels")
    return least, min(most, MAX_CELLS * cell**2)


def section_of(fields: JsonFields, name: str) -> JsonFields:
    return fields.section(name) or JsonFields({}, f"{fields.where}, {name}")


def longest_edge(images: JsonFields, name: str, default: int) -> int:
    section = images.section(name)
    return default if section is None else section.integer("longest_edge", 1, MAX_EDGE)


def read_scaling(images: JsonFields, defaults: tuple[Rgb, Rgb]) -> Scaling:
    mean, deviation = defaults
    rescale = images.number("rescale_factor", 0.0, 1e6, 1 / 255)
    return Scaling(rescale, _rgb(images, "image_mean", mean), _rgb(images, "image_std", deviation))


def _rgb(images: JsonFields, name: str, default: Rgb) -> Rgb:
    if not images.has(name):
        return default
    red, green, blue = images.numbers(name, CHANNELS, -1e3, 1e3)
    return red, green, blue


def image_token(fields: JsonFields) -> str:
    return "image_token_index" if fields.has("image_token_index") else "image_token_id"


def check_square(images: JsonFields, edge: int) -> None:
    size = images.section("size") or JsonFields({}, images.where)
    for name in ("height", "width"):
        if size.integer(name, 1, MAX_EDGE, edge) != edge:
            raise images.error("size", f"must be that of the encoder, {edge} x {edge}")
