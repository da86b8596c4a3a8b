"""Short names of models that can be pulled, and the repositories and files on the hub that they stand for.

Repositories are their makers' own where these publish what is served here; none needs a licence to be accepted first.
"""

from difflib import get_close_matches
from pathlib import Path

from alignedserve.core.errors import ModelNotFound
from alignedserve.runtime.model.built_in import POCKET, SMOLLM2, smollm2_file

SHORT_NAMES = {
    "smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2:360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2:1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF",
    "qwen2.5": "Qwen/Qwen2.5-0.5B-Instruct-GGUF:q4_k_m",
    "qwen2.5:1.5b": "Qwen/Qwen2.5-1.5B-Instruct-GGUF:q4_k_m",
    "qwen3": "Qwen/Qwen3-0.6B-GGUF:Q8_0",
    "qwen3:1.7b": "Qwen/Qwen3-1.7B-GGUF:Q8_0",
    "qwen3:4b": "Qwen/Qwen3-4B-GGUF:Q4_K_M",
    "qwen3:8b": "Qwen/Qwen3-8B-GGUF:Q4_K_M",
    "granite": "ibm-granite/granite-3.3-2b-instruct",
    "phi4-mini": "microsoft/Phi-4-mini-instruct",
    "bge-small": "BAAI/bge-small-en-v1.5",
    "minilm": "sentence-transformers/all-MiniLM-L6-v2",
}


def full_name(name: str) -> str:
    """Return what a short name stands for on the hub; any other name, and what is on this machine, unchanged."""
    if name not in SHORT_NAMES or Path(name).exists() or (name == SMOLLM2 and _has_smollm2()):
        return name
    return SHORT_NAMES[name]


def near_names(name: str) -> tuple[str, ...]:
    """Return the short names that an unknown name may have meant: those like it, else all."""
    known = (POCKET, *SHORT_NAMES)
    near = get_close_matches(name, known, n=2)
    return tuple(near or known)


def _has_smollm2() -> bool:
    try:
        smollm2_file()
    except ModelNotFound:
        return False
    return True
