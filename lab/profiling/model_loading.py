"""Models for measurements: a named shape with random weights, or a model by name or path."""

from alignedserve.core.errors import ConfigError
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.named_models import BUILT_IN, model_path
from alignedserve.runtime.model.weight_files import ModelSpec, load_or_draw
from alignedserve.runtime.model.weights.weight_loader import DecoderWeights, leave_rounded_rows_unwritten
from lab.profiling.shapes import SHAPES


def load_decoder(model: str, dtype: str, device: str = "cpu", seed: int = 0) -> Decoder:
    """Load a model with its weights in this dtype. Raises ModelError or ConfigError."""
    config = config_of(model)
    weights = weights_of(model, config, dtype, device, seed=seed)
    leave_rounded_rows_unwritten(weights, config)
    return Decoder(config, weights)


def config_of(model: str) -> ModelConfig:
    """Read the model's configuration. Raises ConfigError listing the names."""
    if model in SHAPES:
        return SHAPES[model]
    path = model_path(model)
    if not path.exists():
        names = ", ".join((*BUILT_IN, *SHAPES))
        raise ConfigError(f"model {model!r} is neither a folder, a GGUF file nor one of {names}.")
    return read_config(path)


def weights_of(
    model: str, config: ModelConfig, dtype: str, device: str, quantization: str | None = None, *, seed: int = 0
) -> DecoderWeights:
    """Load the weights, or draw those of a named shape. Raises ModelError."""
    folder = None if model in SHAPES else model_path(model)
    return load_or_draw(ModelSpec(config, folder, dtype, quantization, seed), device)
