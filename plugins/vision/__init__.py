"""Pictures in prompts: models that see. The extra `vision`.

The core calls the functions below. Each imports its own parts when called: only workers load torch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import PIL  # noqa: F401  (without it this plugin is not installed)

from alignedserve.core.seeing import PictureForm

if TYPE_CHECKING:
    import torch

    from alignedserve.runtime.model.decoder.model_config import ModelConfig
    from alignedserve.runtime.pictures import Pictures, TakeTurn
    from plugins.vision.conversation_pictures import GatewayPictures
    from plugins.vision.mobile_config import SeeingConfig


def read_encoder(folder: Path, config: "ModelConfig") -> "SeeingConfig | None":
    """Return how the model in the folder sees; None: it does not. Raises ModelError, UnsupportedModel."""
    from plugins.vision.families import read_vision

    encoder = read_vision(folder, config.family)
    return None if encoder is None else encoder.with_work(config.shape("", config.dtype).token_parameters)


def decode_record(kind: type, value: Any) -> Any:
    """Return a PictureForm or a PictureEncoder, as `kind` says, from its plain values. Raises msgspec.MsgspecError."""
    from plugins.vision import forms, mobile_config

    record: Any = forms.PictureForm if kind is PictureForm else mobile_config.SeeingConfig
    return msgspec.convert(value, record)


def gateway_pictures(*, fetches: bool) -> "GatewayPictures":
    """Return what reads the pictures of requests. `fetches`: False: pictures of URLs raise NeedsGateway."""
    from plugins.vision.conversation_pictures import GatewayPictures

    return GatewayPictures(fetches=fetches)


def worker_pictures(
    encoder: "SeeingConfig",
    folder: Path | None,
    dtype: "torch.dtype",
    device: "torch.device",
    *,
    take_turn: "TakeTurn",
    has_real_time: Callable[[], bool],
) -> "Pictures":
    """Load the encoder from `folder`, None: with random weights, and return what sees by it. Raises ModelError."""
    from plugins.vision.mobile_config import MobileConfig
    from plugins.vision.mobile_tower import MobileTower, load_mobile_weights
    from plugins.vision.sequence_pictures import SequencePictures
    from plugins.vision.tower import VisionTower
    from plugins.vision.vision_config import CACHE_BYTES
    from plugins.vision.vision_weights import load_vision_weights

    tower: MobileTower | VisionTower
    if isinstance(encoder, MobileConfig):
        tower = MobileTower(encoder, load_mobile_weights(folder, encoder, dtype, device))
    else:
        tower = VisionTower(encoder, load_vision_weights(folder, encoder, dtype, device), dtype, device)
    return SequencePictures(tower, cache_bytes=CACHE_BYTES, take_turn=take_turn, has_real_time=has_real_time)
