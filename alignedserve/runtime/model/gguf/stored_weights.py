"""The weights of a GGUF file as a worker holds them: their bytes in memory, and a line that says what is unpacked."""

from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec

from alignedserve.core.block_layout import DTYPE_BYTES
from alignedserve.core.errors import ModelError
from alignedserve.gguf.file import GgufFile, GgufTensor
from alignedserve.gguf.tensor_types import FLOAT_TYPES, grouped_row_bytes, packed_row_bytes
from alignedserve.runtime.model.gguf.config import EMBEDDING, HEAD
from alignedserve.runtime.model.stored_weights import UNPACKED_TOGETHER, StoredWeights

_HAS_KERNELS = find_spec("kernels._native") is not None
_BLOCK_DTYPES = ("float32", "bfloat16")


def stored_weights(file: GgufFile, dtype: str, device: str, quantization: str | None = None) -> StoredWeights:
    """Return what a worker on `device`, computing in `dtype`, makes of the file's tensors.

    Raises ModelError naming a tensor of experts in a model without any.
    """
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
    # Experts are multiplied together, so that one unpacked unpacks all.
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
