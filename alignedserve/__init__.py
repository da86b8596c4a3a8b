"""AlignedServe serves real-time chat and best-effort documents from one fleet of LLM workers: chat keeps its
objectives, documents are never lost.

Importing this loads nothing: an export is loaded when it is first asked for.
"""

from typing import Any

__all__ = ["LLM", "LoRARequest", "SamplingParams", "StructuredOutputs"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from alignedserve.core.own_packages import require_own_kernels

        require_own_kernels()
        from alignedserve.offline.llm import LLM

        return LLM
    if name == "LoRARequest":
        from alignedserve.offline.sampling import LoRARequest

        return LoRARequest
    if name == "SamplingParams":
        from alignedserve.offline.sampling import SamplingParams

        return SamplingParams
    if name == "StructuredOutputs":
        from alignedserve.runtime.grammar.constraints import StructuredOutputs

        return StructuredOutputs
    raise AttributeError(f"module 'alignedserve' has no attribute {name!r}")
