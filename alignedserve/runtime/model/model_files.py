"""The files of a model: a Hugging Face folder, or one GGUF file. Without torch.

Reads config.json and generation_config.json of a Hugging Face model folder into a ModelConfig; runs no code of it.

Both generations of the files are read: `rope_theta` + `rope_scaling` + `torch_dtype`, and the later
`rope_parameters` + `dtype`.

The bytes of packed weights in a worker, by the headers of a folder's files or of a GGUF file."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from alignedserve.core.block_layout import DTYPE_BYTES
from alignedserve.core.errors import ModelError, ModelNotFound, UnsupportedModel
from alignedserve.core.json_fields import JsonFields, read_json_object
from alignedserve.gguf.file import SUFFIX, GgufFile, GgufTensor, is_gguf, part_names
from alignedserve.gguf.tensor_types import FLOAT_TYPES, grouped_row_bytes, packed_row_bytes
from alignedserve.runtime.model.decoder.decoder_parts import CheckpointQuantization, QuantMethod
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.encoder.encoder_config import (
    ENCODER_TYPES,
    EncoderConfig,
    is_encoder_type,
    parse_encoder_config,
)
from alignedserve.runtime.model.families.table import FAMILIES
from alignedserve.runtime.model.gguf.config import EMBEDDING, HEAD, gguf_config
from alignedserve.runtime.model.named_models import near_names
from alignedserve.runtime.model.quantized.config import read_quantization
from alignedserve.runtime.model.quantized.layout import (
    GROUPS_OF_GPUS,
    Computing,
    ProductForm,
    StoredMatrix,
    form_bytes,
    has_weight,
    stored_matrix,
)
from alignedserve.runtime.model.weight_index import INDEX_NAME, SINGLE_NAME, WeightIndex, listed_shards
from alignedserve.runtime.model.weight_names import find_head, find_prefix, linear_modules
from alignedserve.text.tokenizer_files import end_token_id, unused_texts

UNPACKED_TOGETHER = 2  # gates and ups


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The weights of one model in one worker."""

    num_bytes: int
    step_bytes: int  # of the matrices that every token passes; of experts, those of a single token
    description: str  # for people: the types in the files, and those that are unpacked
    warning: str | None = None  # what unpacking costs, where it costs much
    unpacking_bytes: int = 0  # in which a GPU unpacks the widest product for many rows, one at a time


_MIB = 1 << 20


class _Matrix(NamedTuple):
    stored: StoredMatrix
    form: ProductForm
    step_share: float  # of its bytes, read for a single token
    is_expert: bool


def quantized_weights(
    folder: Path, config: ModelConfig, computing: Computing, quantization: str | None = None
) -> StoredWeights:
    """Return what a worker makes of the tensors in `folder`. Raises ModelError naming a tensor that does not fit the
    config."""
    stored = config.stored_quantization
    assert stored is not None, "the files hold floats"
    matrices = _matrices(folder, config, computing, stored)
    num_bytes, step_bytes = config.loaded_weight_bytes(computing.dtype, quantization), config.num_multiplied
    label = ", ".join(dict.fromkeys(matrix.stored.scheme.label for matrix in matrices)) or "no matrix"
    described = f"{stored.method.value}, {label} ({len(matrices)} matrices)"
    if quantization is not None:
        described += f"; unpacked, and packed again as {quantization}"
        return StoredWeights(num_bytes, step_bytes, "; ".join((described, *stored.remarks)))
    itemsize = DTYPE_BYTES[computing.dtype]
    saved = [(matrix, _count(matrix) * itemsize - _bytes(matrix, computing)) for matrix in matrices]
    num_bytes -= sum(count for _, count in saved)
    step_bytes = step_bytes * itemsize - int(sum(matrix.step_share * count for matrix, count in saved))
    forms = Counter(matrix.form for matrix in matrices)
    parts = [f"{form.value} ({count})" for form, count in forms.most_common() if form is not ProductForm.UNPACKED]
    if parts:
        described += f"; multiplied {', '.join(parts)}"
    warning = _warning(matrices, computing)
    described += "" if warning is None else f"; {warning}"
    unpacking_bytes = UNPACKED_TOGETHER * itemsize * _widest(matrices, config.vocab_size)
    return StoredWeights(num_bytes, step_bytes, "; ".join((described, *stored.remarks)), warning, unpacking_bytes)


def _matrices(folder: Path, config: ModelConfig, computing: Computing, stored: CheckpointQuantization) -> list[_Matrix]:
    index, names = WeightIndex(folder), FAMILIES[config.family].names
    prefix = find_prefix(names, lambda name: has_weight(index, name))
    share = 1.0 if config.experts is None else config.experts.num_chosen / config.experts.num_experts
    # A tensor may hold a matrix of every expert.
    stacked = 1 if config.experts is None or stored.method is not QuantMethod.MXFP4 else config.experts.num_experts
    matrices = []
    for number, module in enumerate(linear_modules(config, names, prefix, lambda name: has_weight(index, name))):
        if number >= len(index.file_of) * stacked:
            raise ModelError(f"{folder}: config.json has more matrices than the files have tensors.")
        try:
            matrix = stored_matrix(index, stored, module.name, (module.rows, module.width))
        except ModelError as error:
            raise ModelError(f"{folder}: {error}") from error
        if matrix is not None:
            form = computing.form_of_expert(matrix) if module.is_expert else computing.form_of(matrix)
            matrices.append(_Matrix(matrix, form, share if module.is_expert else 1.0, module.is_expert))
    return _as_computed_together(matrices, computing)


def _as_computed_together(matrices: list[_Matrix], computing: Computing) -> list[_Matrix]:
    forms = {matrix.form for matrix in matrices if matrix.is_expert}
    if not computing.is_gpu or ProductForm.UNPACKED not in forms:
        return matrices
    return [matrix._replace(form=ProductForm.UNPACKED) if matrix.is_expert else matrix for matrix in matrices]


def _widest(matrices: list[_Matrix], vocab_size: int) -> int:
    layers = [matrix for matrix in matrices if not matrix.is_expert and matrix.stored.rows != vocab_size]
    return max((_count(layer) for layer in layers if layer.form in GROUPS_OF_GPUS), default=0)


def _warning(matrices: list[_Matrix], computing: Computing) -> str | None:
    unpacked = [matrix for matrix in matrices if matrix.form is ProductForm.UNPACKED]
    if not unpacked:
        return None
    labels = ", ".join(dict.fromkeys(matrix.stored.scheme.label for matrix in unpacked))
    taken = sum(_bytes(matrix, computing) for matrix in unpacked) // _MIB
    packed = sum(_count(matrix) * matrix.stored.scheme.num_bits // 8 for matrix in unpacked) // _MIB
    return f"{len(unpacked)} matrices unpacked to {computing.dtype} ({labels}): {taken} MiB instead of {packed}"


def _count(matrix: _Matrix) -> int:
    return matrix.stored.rows * matrix.stored.width


def _bytes(matrix: _Matrix, computing: Computing) -> int:
    return form_bytes(matrix.stored, matrix.form, computing.dtype)


_HAS_KERNELS = find_spec("kernels._native") is not None
_BLOCK_DTYPES = ("float32", "bfloat16")


def stored_weights(file: GgufFile, dtype: str, device: str, quantization: str | None = None) -> StoredWeights:
    """Return what a worker makes of a GGUF file's tensors. Raises ModelError naming experts in a model without any."""
    is_on_gpu = device.startswith("cuda")
    is_in_blocks = not is_on_gpu and quantization is None and dtype in _BLOCK_DTYPES and _HAS_KERNELS
    row_bytes = _row_bytes(file, is_on_gpu=is_on_gpu, is_in_blocks=is_in_blocks)
    packed_bytes = 1 if quantization == "int8" else DTYPE_BYTES[dtype]
    num_bytes = step_bytes = 0
    matrices, packed, unpacked = Counter[str](), Counter[str](), Counter[str]()
    widest = 0  # elements of a product that a GPU unpacks for many rows
    for tensor in file.tensors.values():
        width, is_matrix = tensor.shape[-1], len(tensor.shape) > 1  # or, of experts, many
        own_bytes = row_bytes(tensor) if is_matrix else None
        loaded_bytes = tensor.num_rows * (width * packed_bytes if own_bytes is None else own_bytes)
        if is_on_gpu and own_bytes is not None and len(tensor.shape) == 2 and tensor.name not in (EMBEDDING, HEAD):
            widest = max(widest, tensor.num_rows * width)
        if tensor.name == EMBEDDING and HEAD in file.tensors:
            loaded_bytes = 0  # only looked up, see below
        num_bytes += loaded_bytes
        if is_matrix:
            step_bytes += _step_bytes(file, tensor, loaded_bytes)
            matrices[tensor.type.name] += 1
            if tensor.type.name not in FLOAT_TYPES:
                (unpacked if own_bytes is None else packed)[tensor.type.name] += 1
    num_bytes += _looked_up_bytes(file.tensors[EMBEDDING], dtype, is_in_blocks=is_in_blocks)
    described = "matrices " + ", ".join(f"{name} ({count})" for name, count in matrices.most_common())
    if packed:
        described += f"; {', '.join(packed)} multiplied in {'groups' if is_on_gpu else 'blocks'}"
    if unpacked:
        described += f"; {', '.join(unpacked)} unpacked to {quantization or dtype}, which takes more memory and time"
    return StoredWeights(
        num_bytes, step_bytes, described, unpacking_bytes=UNPACKED_TOGETHER * DTYPE_BYTES[dtype] * widest
    )


def _row_bytes(file: GgufFile, *, is_on_gpu: bool, is_in_blocks: bool) -> Callable[[GgufTensor], int | None]:
    if not is_on_gpu:
        return lambda tensor: packed_row_bytes(tensor.type.name, tensor.shape[-1]) if is_in_blocks else None
    # Experts are multiplied together: an unpacked expert unpacks all.
    experts = [tensor for tensor in file.tensors.values() if len(tensor.shape) > 2]
    are_packed = all(grouped_row_bytes(tensor.type.name, tensor.shape[-1]) is not None for tensor in experts)

    def row_bytes(tensor: GgufTensor) -> int | None:
        is_packed = are_packed or len(tensor.shape) == 2
        return grouped_row_bytes(tensor.type.name, tensor.shape[-1]) if is_packed else None

    return row_bytes


def _step_bytes(file: GgufFile, tensor: GgufTensor, loaded_bytes: int) -> int:
    if len(tensor.shape) == 2:
        return loaded_bytes
    num_chosen = file.metadata.get(f"{file.metadata['general.architecture']}.expert_used_count")
    if not isinstance(num_chosen, int):
        shape = list(tensor.shape)
        raise ModelError(f"{tensor.path}: tensor {tensor.name[:80]} has shape {shape}, in a model without experts.")
    return loaded_bytes * num_chosen // tensor.shape[0]


def _looked_up_bytes(embedding: GgufTensor, dtype: str, *, is_in_blocks: bool) -> int:
    width = embedding.shape[-1]
    row_bytes = packed_row_bytes(embedding.type.name, width) if is_in_blocks else None
    return embedding.num_rows * (width * DTYPE_BYTES[dtype] if row_bytes is None else row_bytes)


MAX_CONFIG_BYTES = 1 << 20
GENERATION_CONFIG = "generation_config.json"


def read_model_config(folder: Path) -> ModelConfig:
    """Read the config of the model in `folder`. Raises ModelNotFound, UnsupportedModel naming the architecture or
    option that is not supported, ModelError naming the wrong field."""
    if not folder.is_dir():
        short = f" Short names: {', '.join(near_names(str(folder)))}." if folder.name == str(folder) else ""
        raise ModelNotFound(
            f"{folder} is neither a folder here nor a name on a hub (ORG/NAME, such as Qwen/Qwen3-0.6B).{short}"
        )
    path = folder / "config.json"
    config = parse_model_config(read_json_object(path, MAX_CONFIG_BYTES), where=str(path))
    is_tied = config.ties_embeddings and not _has_both_ends(config, folder)
    return replace(config, eos_token_ids=_end_tokens(config, folder), ties_embeddings=is_tied)


def _has_both_ends(config: ModelConfig, folder: Path) -> bool:
    """Return whether the files hold an embedding and a head: a head in the files counts, whatever config.json says."""
    try:
        has = partial(has_weight, WeightIndex(folder))
    except ModelError:  # reading the weights raises the same
        return False
    names = FAMILIES[config.family].names
    return has(f"{find_prefix(names, has)}{names.embedding}.weight") and has(f"{find_head(names, has)}.weight")


def _end_tokens(config: ModelConfig, folder: Path) -> tuple[int, ...]:
    end_ids, path = config.eos_token_ids, folder / GENERATION_CONFIG
    if path.exists():
        generation = JsonFields(read_json_object(path, MAX_CONFIG_BYTES), str(path))
        end_ids = generation.token_ids("eos_token_id", config.vocab_size) or end_ids
    end_id = end_token_id(folder)
    return end_ids if end_id is None or end_id in end_ids or end_id >= config.vocab_size else (*end_ids, end_id)


def read_any_config(folder: Path) -> ModelConfig | EncoderConfig:
    """Read the config of the decoder or encoder in `folder`. Raises like `read_model_config`."""
    path = folder / "config.json"
    if not path.exists():
        return read_model_config(folder)
    fields = JsonFields(read_json_object(path, MAX_CONFIG_BYTES), str(path))
    return parse_encoder_config(fields, folder) if is_encoder_type(fields) else read_model_config(folder)


def parse_model_config(content: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Parse an already decoded config.json. Raises like `read_model_config`."""
    content = _with_scaling(content)
    text = content.get("text_config")
    fields = JsonFields({**content, "text_config": _with_scaling(text)} if isinstance(text, dict) else content, where)
    model_type = fields.text("model_type")
    if is_encoder_type(fields):
        raise UnsupportedModel(f"{where}: model_type {model_type!r} is an encoder's, and a decoder is needed here.")
    form = FAMILIES.get(model_type)
    if form is None:
        known = (*FAMILIES, *ENCODER_TYPES)
        near = get_close_matches(model_type, known, n=2)
        hint = f" The nearest: {' and '.join(near)}." if near else ""
        raise UnsupportedModel(f"{where}: model_type {model_type!r} is not one of {', '.join(known)}.{hint}")
    return replace(form.read(fields, model_type, form), stored_quantization=read_quantization(fields))


_BESIDE_SCALING = ("rope_theta", "partial_rotary_factor", "mrope_section")  # what a scaling leaves as it is


def _with_scaling(content: dict[str, Any]) -> dict[str, Any]:
    """Move `rope_scaling` into `rope_parameters`: makers' pages say to add it, whatever stands there already."""
    parameters, scaling = content.get("rope_parameters"), content.get("rope_scaling")
    if not isinstance(parameters, dict) or not isinstance(scaling, dict) or not scaling:
        return content
    if "full_attention" in parameters or "sliding_attention" in parameters:
        merged = {**parameters, "full_attention": _scaled(parameters.get("full_attention"), scaling)}
    else:
        stated = {name: value for name, value in content.items() if value is not None}
        merged = _scaled({**parameters, **stated}, scaling)
    return {**content, "rope_parameters": merged}


def _scaled(parameters: Any, scaling: dict[str, Any]) -> dict[str, Any]:
    stated = parameters if isinstance(parameters, dict) else {}
    return {**{name: stated[name] for name in _BESIDE_SCALING if name in stated}, **scaling}


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
