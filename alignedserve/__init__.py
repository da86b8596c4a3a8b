"""AlignedServe. What it exports is loaded when it is first asked for; importing this loads nothing."""

from typing import Any

__all__ = ["LLM", "SamplingParams", "StructuredOutputs"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from alignedserve.offline import LLM

        return LLM
    if name == "SamplingParams":
        from alignedserve.core.request import SamplingParams

        return SamplingParams
    if name == "StructuredOutputs":
        from alignedserve.runtime.grammar.constraints import StructuredOutputs

        return StructuredOutputs
    raise AttributeError(f"module 'alignedserve' has no attribute {name!r}")
