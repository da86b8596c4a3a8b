"""Names of dtypes, as config files and block layouts spell them, and torch's own."""

import torch

from alignedserve.core.errors import UnsupportedModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of this name. Raises UnsupportedModel listing the names there are."""
    if name not in _DTYPES:
        raise UnsupportedModel(f"dtype {name!r} is not one of {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype that `torch_dtype` knows."""
    return str(dtype).removeprefix("torch.")
