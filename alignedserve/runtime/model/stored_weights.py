"""The bytes of packed weights in a worker, by the headers of a folder's files or of a GGUF file."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from alignedserve.core.block_layout import DTYPE_BYTES
from alignedserve.core.errors import ModelError
from alignedserve.gguf.file import GgufFile, GgufTensor
from alignedserve.gguf.tensor_types import FLOAT_TYPES, grouped_row_bytes, packed_row_bytes
from alignedserve.runtime.model.decoder.decoder_parts import CheckpointQuantization, QuantMethod
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.families.table import FAMILIES
from alignedserve.runtime.model.gguf.config import EMBEDDING, HEAD
from alignedserve.runtime.model.quantized.layout import StoredMatrix, has_weight, stored_matrix
from alignedserve.runtime.model.quantized.product_form import GROUPS_OF_GPUS, Computing, ProductForm, form_bytes
from alignedserve.runtime.model.weight_index import WeightIndex
from alignedserve.runtime.model.weight_names import find_prefix, linear_modules

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
