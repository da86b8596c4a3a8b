"""A tiny MobileNet-V5: its weights and a picture, from seeds, and what timm makes of them (tiny_mobile.json).

    python -m tests.support.models.tiny_mobile      # writes that anew, where timm is installed

timm needs torchvision, of which its wheels on PyPI load beside a torch for GPUs alone. So it is no dependency of the
tests; what it needs of that is stood in for.
"""

import json
import sys
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor

from plugins.vision.decoder import Pixels
from plugins.vision.forms import FixedForm, Scaling
from plugins.vision.mobile_config import (
    ARCHITECTURES,
    EdgeBlock,
    InvertedBlock,
    MobileConfig,
    QueryBlock,
    Shapes,
)

RECORD = Path(__file__).with_suffix(".json")
EDGE, MAP_EDGE, IMAGE = 96, 2, 198
STEP = 61  # from a recorded channel to the next
_BLOCKS = [
    ["er_r1_k3_s2_e4_c16", "er_r1_k3_s1_e4_c16"],
    ["uir_r1_a3_k5_s2_e6_c24", "uir_r1_a5_k0_s1_e4_c24"],
    ["uir_r1_a5_k5_s2_e6_c32", "uir_r1_a0_k0_s1_e1_c32", "mqa_r1_k3_h2_v2_s1_d8_c32", "uir_r1_a0_k0_s1_e2_c32"],
    ["uir_r1_a5_k5_s2_e6_c40", "mqa_r1_k3_h3_s1_d8_c40", "uir_r1_a0_k0_s1_e2_c40"],
]
CONFIG = MobileConfig(
    form=FixedForm(IMAGE, EDGE, MAP_EDGE**2 + 1, Scaling(1 / 255, (0.0,) * 3, (1.0,) * 3), 2),
    stages=(
        (EdgeBlock(16, 2), EdgeBlock(16)),
        (InvertedBlock(24, 2, first=3, middle=5, expansion=6), InvertedBlock(24, first=5)),
        (
            InvertedBlock(32, 2, first=5, middle=5, expansion=6),
            InvertedBlock(32, expansion=1),
            QueryBlock(32, 2, 8, key_stride=2),
            InvertedBlock(32, expansion=2),
        ),
        (
            InvertedBlock(40, 2, first=5, middle=5, expansion=6),
            QueryBlock(40, 3, 8),
            InvertedBlock(40, expansion=2),
        ),
    ),
    stem_width=8,
    hidden_size=2048,  # as timm has it, always
    out_width=64,
    num_marks=3,
    end_mark=1,
    eps=1e-6,
)


def random_tensors(shapes: Shapes, seed: int) -> dict[str, Tensor]:
    """Return weights whose products leave numbers about as large as they were."""
    random, made = np.random.default_rng(seed), {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape, np.float32)
        fan = np.prod(shape[1:]) if len(shape) > 1 else 25.0
        made[name] = torch.from_numpy(values / np.float32(np.sqrt(fan)) + np.float32(len(shape) == 1))
    return made


def random_pixels(edge: int = EDGE) -> Pixels:
    """Return a picture."""
    return np.random.default_rng(7).integers(0, 256, (3, edge, edge), np.uint8)


def recorded_map() -> Tensor:
    """Return what timm made of it [places, some channels]."""
    return torch.tensor(json.loads(RECORD.read_text(encoding="utf-8"))["map"], dtype=torch.float32)


def timm() -> ModuleType:
    """Import timm. Raises ImportError where it is not installed."""
    for name in ("", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".datasets"):
        module = MagicMock()
        module.__spec__, module.__path__ = ModuleSpec(f"torchvision{name}", None), []
        sys.modules.setdefault(f"torchvision{name}", module)
    sys.modules["torchvision.ops.misc"].FrozenBatchNorm2d = type("FrozenBatchNorm2d", (torch.nn.Module,), {})  # type: ignore[attr-defined]
    return import_module("timm")


def timm_tower() -> Any:
    """Return timm's tower with these weights."""
    timm()
    builder, models = import_module("timm.models._efficientnet_builder"), import_module("timm.models.mobilenetv5")
    tower = models.MobileNetV5Encoder(
        block_args=builder.decode_arch_def(_BLOCKS),
        stem_size=CONFIG.stem_width,
        fix_stem=True,
        pad_type="same",
        msfa_output_resolution=MAP_EDGE,
        round_chs_fn=partial(builder.round_channels, multiplier=1.0),
        norm_layer=import_module("timm.layers").RmsNorm2d,
        act_layer=partial(torch.nn.GELU, approximate="tanh"),
        layer_scale_init_value=1e-5,
    )
    tower.load_state_dict(random_tensors(CONFIG.tower_shapes(), 1))
    return tower.eval()


def timm_map(tower: Any) -> Tensor:
    """Return what timm's tower makes of the picture [places, hidden_size]."""
    pixels = torch.from_numpy(random_pixels()).float()[None] / 255
    with torch.no_grad():
        made: Tensor = tower(pixels)[0].flatten(1).t()
    return made


def timm_shapes(architecture: str) -> Shapes:
    """Return the tensors of a whole encoder as timm has it."""
    with torch.device("meta"):
        model = timm().create_model(architecture)
    return {name: tuple(own.shape) for name, own in model.state_dict().items()}


if __name__ == "__main__":
    made = timm_map(timm_tower())
    RECORD.write_text(
        json.dumps({"timm": timm().__version__, "map": made[:, ::STEP].tolist()}) + "\n", encoding="utf-8"
    )
    print(made.shape, made.std(), list(ARCHITECTURES))
