"""The weights of a folder with quantised matrices as a worker holds them, by the headers of its files."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from alignedserve.core.block_layout import DTYPE_BYTES
from alignedserve.core.errors import ModelError
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.families.table import FAMILIES
from alignedserve.runtime.model.quantized.layout import StoredMatrix, has_weight, stored_matrix
from alignedserve.runtime.model.quantized.product_form import GROUPS_OF_GPUS, Computing, ProductForm, form_bytes
from alignedserve.runtime.model.quantized.scheme import CheckpointQuantization, QuantMethod
from alignedserve.runtime.model.stored_weights import UNPACKED_TOGETHER, StoredWeights
from alignedserve.runtime.model.weight_index import WeightIndex
from alignedserve.runtime.model.weight_names import find_prefix, linear_modules

_MIB = 1 << 20


class _Matrix(NamedTuple):
    stored: StoredMatrix
    form: ProductForm
    step_share: float  # of its bytes, read for a single token
    is_expert: bool


def quantized_weights(
    folder: Path, config: ModelConfig, computing: Computing, quantization: str | None = None
) -> StoredWeights:
    """Return what a worker makes of the tensors in `folder`; `quantization` as in the model's section.

    Raises ModelError naming a tensor that does not fit the config.
    """
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
    layers = [own for own in matrices if not own.is_expert and own.stored.rows != vocab_size]
    return max((_count(own) for own in layers if own.form in GROUPS_OF_GPUS), default=0)


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
