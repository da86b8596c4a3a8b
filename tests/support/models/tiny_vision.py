"""Small random checkpoints of models that see, written by transformers, and pictures for them."""

import io
import json
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.support.models.tiny_models import ROWS, transformers_library

IMAGE = 198  # stands in prompts for a picture's tokens
MARKS = ("<image>", "<fake_token_around_image>", "<global-img>")
TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}<image>{% endif %}"
    "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT, _ROWS = ROWS["text parts"]["text"], ROWS["seeing"]
_PROCESSORS = {family: row["processor"] for family, row in _ROWS.items()}


def _seeing(family: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    row = {**_ROWS[_ROWS[family].get("like", family)], **_ROWS[family]}
    arguments = {name: row[name] for name in row if name not in ("about", "like", "of", "processor", "images")}
    return row["of"], {**arguments, "text_config": {**_TEXT, **arguments["text_config"]}}, row["images"]


# Family: config class, its arguments, the sizes of its processor of images.
TINY_SEEING = {family: _seeing(family) for family in _ROWS}


def make_tiny_seeing(folder: Path, family: str, **text: Any) -> Any:
    """Write a checkpoint and the config of its processor; return the model (float32, evaluation mode).

    `text`: values of its text part that replace those of the family.
    """
    library = transformers_library()
    class_name, arguments, images = TINY_SEEING[family]
    if text:
        arguments = {**arguments, "text_config": {**arguments["text_config"], **text}}
    torch.manual_seed(0)
    model: Any = library.AutoModelForImageTextToText.from_config(
        getattr(library, class_name)(**arguments), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn(parameter.shape) * (0.05 if "norm" in name or "bias" in name else 0.08))
        for name, buffer in model.named_buffers():
            if name.endswith(("std_bias", "std_scale", "layer_scalar")):
                buffer.add_(torch.randn(buffer.shape) * 0.2)
            elif name.endswith(("put_min", "put_max")):  # of what products read and give
                buffer.copy_(torch.rand(()) + 0.5).mul_(-1 if name.endswith("min") else 1)
    model.train(False)
    library.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, safe_serialization=True)
    if family == "qwen3_vl_moe":  # published files have experts' matrices turned
        path = folder / "model.safetensors"
        tensors = load_file(path).items()
        turned = {name: own.mT.contiguous() if ".experts." in name else own for name, own in tensors}
        save_file(turned, path, {"format": "pt"})
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    return model


def processed(family: str, *files: bytes, **options: bool) -> Any:
    """Return what transformers' own processor makes of pictures of one prompt, as arguments of its model."""
    if family == "llama4":
        return {"pixel_values": torch.cat([llama4_tiles(file)[0] for file in files])}
    name = _PROCESSORS[family]
    place = {"Qwen2VL": "qwen2_vl"}.get(name, name.lower())
    module = import_module(f"transformers.models.{place}.image_processing_pil_{place}")
    processor = getattr(module, f"{name}ImageProcessorPil")(**TINY_SEEING[family][2])
    images = [Image.open(io.BytesIO(file)) for file in files]
    made = processor([images] if place in ("idefics3", "smolvlm") else images, return_tensors="pt", **options)
    for name in ("num_crops", "num_soft_tokens_per_image"):  # of which the models know nothing
        made.pop(name, None)
    return made


@cache
def llama4_rules() -> Any:
    """Return the module that has Llama 4's sizes of pictures; it imports torchvision, which they do not need."""
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    stubs = {name: ModuleType(name) for name in names if name not in sys.modules}
    if stubs:
        stubs[names[-1]].functional = None  # type: ignore[attr-defined]
    sys.modules.update(stubs)
    try:
        return import_module("transformers.models.llama4.image_processing_llama4")
    finally:
        for name in stubs:
            del sys.modules[name]


def llama4_tiles(file: bytes, *, by_torch: bool = False) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return what Llama 4's processor makes of a picture, and the rows and columns of its canvas.

    Its pixels are made by torchvision, which resizes by a function of PyTorch. Here Pillow does, whose pixels are at
    most one of 256 levels away; or `by_torch` that function.
    """
    resized = resized_by_torch if by_torch else resized_by_pillow
    rules, options = llama4_rules(), TINY_SEEING["llama4"][2]
    edge = options["size"]["height"]
    pixels = torch.from_numpy(np.array(Image.open(io.BytesIO(file)))).permute(2, 0, 1)[None].contiguous()
    size = (pixels.shape[-2], pixels.shape[-1])
    found = rules.find_supported_resolutions(
        options["max_patches"], import_module("transformers.image_utils").SizeDict(**options["size"])
    )
    canvas = rules.get_best_fit(size, torch.tensor(found))
    limits = tuple(min(max(own, edge), most) for own, most in zip(size, canvas, strict=True))
    shown = resized(pixels, *(max(own, 1) for own in rules.get_max_res_without_distortion(size, limits)))
    high, wide = (int(most) for most in canvas)
    padded = torch.nn.functional.pad(shown, (0, wide - shown.shape[-1], 0, high - shown.shape[-2]))
    tiles = padded.view(3, high // edge, edge, wide // edge, edge).permute(1, 3, 0, 2, 4).reshape(-1, 3, edge, edge)
    if len(tiles) > 1:
        tiles = torch.cat((tiles, resized(pixels, edge, edge)))
    half = torch.tensor(0.5, dtype=torch.bfloat16)
    return ((tiles.to(torch.bfloat16) * (1 / 255) - half) / half).float(), (high // edge, wide // edge)


def resized_by_torch(pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    if (height, width) == pixels.shape[-2:]:
        return pixels
    return torch.nn.functional.interpolate(pixels, (height, width), mode="bilinear", antialias=True)


def resized_by_pillow(pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    image = Image.fromarray(pixels[0].permute(1, 2, 0).numpy()).resize((width, height), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]


@cache
def picture(width: int = 23, height: int = 40, seed: int = 0, file_format: str = "PNG") -> bytes:
    """Return the file of a picture with many colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, file_format)
    return file.getvalue()
