"""Names of dtypes, as in config files and block layouts, and torch's dtypes."""

import torch

from alignedserve.core.block_layout import FP8, INT8
from alignedserve.core.errors import UnsupportedModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_ROUNDED = {INT8: torch.int8, FP8: torch.uint8}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of this name. Raises UnsupportedModel listing the known names."""
    if name not in _DTYPES:
        raise UnsupportedModel(f"dtype {name!r} is not one of {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def cache_dtype(name: str) -> torch.dtype:
    return _ROUNDED.get(name) or torch_dtype(name)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype that `torch_dtype` knows."""
    return str(dtype).removeprefix("torch.")
