"""The files of a model: a Hugging Face folder, or one GGUF file. Without torch."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alignedserve.core.errors import ModelError, ModelNotFound
from alignedserve.core.json_fields import read_json_object
from alignedserve.gguf.file import SUFFIX, GgufFile, is_gguf, part_names
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.encoder.encoder_config import EncoderConfig
from alignedserve.runtime.model.gguf.config import gguf_config
from alignedserve.runtime.model.hf_config import (
    GENERATION_CONFIG,
    MAX_CONFIG_BYTES,
    read_any_config,
    read_model_config,
)
from alignedserve.runtime.model.quantized.product_form import Computing
from alignedserve.runtime.model.stored_weights import StoredWeights, quantized_weights, stored_weights
from alignedserve.runtime.model.weight_index import INDEX_NAME, SINGLE_NAME, WeightIndex, listed_shards
from alignedserve.text.tokenizer_files import unused_texts


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
    """Return what a worker makes of packed weights; None: they are plain. Raises ModelError naming a wrong tensor."""
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


# Of generation_config.json; transformers follows them.
_ANSWER_FIELDS = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "num_beams",
    "sequence_bias",
    "stop_strings",
    "suppress_tokens",
    "typical_p",
)
_NEUTRAL: tuple[Any, ...] = (None, 0, 1, [], {})


def unused_parts(folder: Path) -> list[str]:
    """Return what lies in a model's folder, and looks as if it counted, and does not. Raises ModelError."""
    parts = [f"{INDEX_NAME}, beside {SINGLE_NAME}"] if (folder / INDEX_NAME).exists() else []
    parts = parts if (folder / SINGLE_NAME).exists() else []
    if (folder / "adapter_config.json").exists():
        parts.append("adapter_config.json; adapters are served by lora.adapters")
    if (folder / GENERATION_CONFIG).exists():
        content = read_json_object(folder / GENERATION_CONFIG, MAX_CONFIG_BYTES)
        parts += [f"{name} of {GENERATION_CONFIG}" for name in _ANSWER_FIELDS if content.get(name) not in _NEUTRAL]
    return [*parts, *unused_texts(folder)]


_NUM_SAMPLES = 256  # of all files together, evenly spaced: a layer of a hundred has some; each is a read over a network
_SAMPLE_BYTES = 4096
_HEADER_BYTES = 1 << 16  # read of each file, beside the samples


def fingerprint_of(path: Path) -> str:
    """Return the fingerprint of the weights in a folder or GGUF file; empty: they cannot be read."""
    digest = hashlib.sha256()
    try:
        files = [path.with_name(name) for name in part_names(path.name)] if is_gguf(path) else listed_shards(path)
        for file in files:
            digest.update(file.name.encode())
            for part in _samples_of(file, max(_NUM_SAMPLES // len(files), 2)):
                digest.update(part)
    except (ModelError, OSError):
        return ""
    return digest.hexdigest()


@contextmanager
def unchanged_weights(path: Path, fingerprint: str) -> Iterator[None]:
    """Load weights inside the `with` block. Raises ModelError unless the files have this fingerprint before and
    after; an empty one fits all."""
    _require_same(path, fingerprint)
    yield
    _require_same(path, fingerprint)


def _require_same(path: Path, fingerprint: str) -> None:
    if fingerprint and fingerprint_of(path) != fingerprint:
        check_weight_files(path)  # what is missing or cut off is named
        raise ModelError(
            f"{path}: these are not the weights with which the model began to be served; put those back, or serve "
            "the new ones in their place with `alignedserve models replace`."
        )


def _samples_of(path: Path, num_samples: int) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        yield size.to_bytes(8, "little")
        yield os.pread(file.fileno(), _HEADER_BYTES, 0)
        for index in range(1, num_samples + 1):
            yield os.pread(file.fileno(), _SAMPLE_BYTES, max(size * index // num_samples - _SAMPLE_BYTES, 0))
