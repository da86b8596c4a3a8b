"""Makes of pixels what an encoder reads, rounded as transformers rounds it."""

import torch
from torch import Tensor

from alignedserve.pictures.decoder import Pixels
from alignedserve.pictures.form_parts import Scaling


def scaled_pixels(pixels: Pixels, scaling: Scaling) -> Tensor:
    if scaling.is_short:
        values = torch.from_numpy(pixels.copy()).to(torch.bfloat16) * scaling.rescale
    else:  # float64 once, then float32
        values = (torch.from_numpy(pixels.copy()).double() * scaling.rescale).float()
    mean, deviation = (
        torch.tensor(rgb, dtype=values.dtype)[:, None, None] for rgb in (scaling.mean, scaling.deviation)
    )
    return (values - mean) / deviation
