"""The files of a model: a Hugging Face folder, or one GGUF file. Without torch."""

from pathlib import Path

from alignedserve.core.errors import ModelError, ModelNotFound
from alignedserve.gguf.file import SUFFIX, GgufFile, is_gguf
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.encoder.encoder_config import EncoderConfig
from alignedserve.runtime.model.gguf.config import gguf_config
from alignedserve.runtime.model.gguf.stored_weights import stored_weights
from alignedserve.runtime.model.hf_config import read_any_config, read_model_config
from alignedserve.runtime.model.quantized.product_form import Computing
from alignedserve.runtime.model.quantized.stored_weights import quantized_weights
from alignedserve.runtime.model.stored_weights import StoredWeights
from alignedserve.runtime.model.weight_index import WeightIndex


def read_config(path: Path) -> ModelConfig:
    """Read the config of the decoder in the folder or GGUF file at `path`. Raises ModelError."""
    if is_gguf(path):
        return gguf_config(GgufFile(path))
    _require_folder(path)
    return read_model_config(path)


def read_served_config(path: Path) -> ModelConfig | EncoderConfig:
    if is_gguf(path):
        return gguf_config(GgufFile(path))
    _require_folder(path)
    return read_any_config(path)


def _require_folder(path: Path) -> None:
    if path.is_file():
        raise ModelNotFound(f"{path} is a file; a model is a folder or a {SUFFIX} file.")
    if not path.is_dir():
        return
    try:
        pipe = next((file for file in path.iterdir() if file.is_fifo()), None)
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror}.") from error
    if pipe is not None:  # opening it might wait for ever, and with it all orders to the cluster
        raise ModelError(f"{pipe} is a named pipe; a model has regular files.")


def weights_in_files(
    files: Path | GgufFile, config: ModelConfig, computing: Computing, quantization: str | None = None
) -> StoredWeights | None:
    """Return what a worker makes of weights that a folder or GGUF file has packed; None: they are plain.

    Raises ModelError naming a tensor that does not fit.
    """
    if isinstance(files, Path) and is_gguf(files):
        files = GgufFile(files)
    if isinstance(files, GgufFile):
        return stored_weights(files, computing.dtype, computing.device, quantization)
    if config.stored_quantization is None:
        return None
    return quantized_weights(files, config, computing, quantization)


def check_weight_files(path: Path) -> None:
    """Check that all weights are there, by the files' headers alone. Raises ModelError."""
    if is_gguf(path):
        GgufFile(path)
    else:
        WeightIndex(path)
