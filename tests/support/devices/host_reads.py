"""A mode that refuses what makes the host wait for a GPU, for code that runs on a CPU here."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override


class NoHostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what would make the host wait for a GPU: reading a value, and results whose size depends on values."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "bincount")

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        assert name not in self.REFUSED, f"{name} waits for the device"
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        assert not by_mask, "an index of booleans waits for the device"
        return func(*args, **(kwargs or {}))
