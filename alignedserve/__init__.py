"""AlignedServe. `LLM` and `SamplingParams` are loaded when they are first asked for; importing this loads nothing."""

from typing import Any

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from alignedserve.offline import LLM

        return LLM
    if name == "SamplingParams":
        from alignedserve.core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'alignedserve' has no attribute {name!r}")
