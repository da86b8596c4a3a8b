"""The files of a model: a Hugging Face folder, or one GGUF file. Without torch."""

from pathlib import Path

from alignedserve.core.errors import ModelNotFound
from alignedserve.runtime.model.gguf.config import gguf_config
from alignedserve.runtime.model.gguf.file import SUFFIX, GgufFile, is_gguf
from alignedserve.runtime.model.hf_config import read_model_config
from alignedserve.runtime.model.model_config import ModelConfig
from alignedserve.runtime.model.weight_index import WeightIndex


def read_config(path: Path) -> ModelConfig:
    """Read the config of the model in the folder or GGUF file at `path`. Raises ModelError."""
    if is_gguf(path):
        return gguf_config(GgufFile(path))
    if path.is_file():
        raise ModelNotFound(f"{path} is a file; a model is a folder or a {SUFFIX} file.")
    return read_model_config(path)


def check_weight_files(path: Path) -> None:
    """Check that all weights are there, by the files' headers alone. Raises ModelError."""
    if is_gguf(path):
        GgufFile(path)
    else:
        WeightIndex(path)
