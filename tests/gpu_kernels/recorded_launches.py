"""Records every launch of toy engines, as Triton would see it: for `compile_all`, which asks for a file of them.

The engines run in Triton's interpreter, with heads and blocks as an 8B Llama has them, so that what is compiled
elsewhere (`compile_all`) is what is launched: arguments with their types, their divisibility, the constants chosen.
Those kernels alone are interpreted whose results are places or tokens; the results of the others stay zeros.
"""

import argparse
import importlib
import inspect
import json
import pkgutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime import interpreter
from typing_extensions import override

import kernels.gpu
from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.block_layout import FP8
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.attention.backend import TRITON
from alignedserve.runtime.engine.engine import Engine, NewSequence
from alignedserve.runtime.engine.engine_options import EngineOptions
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.lora.adapter_check import read_adapter_files
from alignedserve.runtime.lora.adapter_weights import load_adapter
from alignedserve.runtime.model.quantized import source
from alignedserve.runtime.model.quantized.layout import Computing
from alignedserve.runtime.model.weights import feed_forward_weights
from alignedserve.runtime.model.weights import product_reader as file_products
from kernels import gpu_dispatch, linear
from kernels.activation import Gated
from kernels.block_digests import listed_digests, row_digests
from kernels.cache_blocks import copy_listed, gather_blocks, scatter_blocks
from kernels.float8_linear import float8_inputs
from kernels.gpu import expert_rows, grouped_weights, launching
from kernels.gpu.allowed_tokens import mask_tokens_
from kernels.grouped_linear import UNPACKING_ROWS, GroupedLinear, Numbers, random_weight
from tests.support.devices.quick_interpreter import patch_once_per_kernel
from tests.support.models.lora_folders import write_adapter
from tests.support.models.quantized_checkpoints import (
    FORMATS,
    CheckpointFormat,
    awq_columns,
    float8_blocks,
    quantize_folder,
)
from tests.support.models.tiny_engines import capture_nothing, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

BLOCK_SIZE, NUM_BLOCKS, MAX_CONTEXT_LEN = 16, 64, 256
# A quarter of the heads of an 8B Llama; a group of 4 and heads of 128 as there.
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "num_hidden_layers": 1}
_SIZES = {**_HEADS, "hidden_size": 512, "intermediate_size": 512, "vocab_size": 512}
_WIDE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 5000}
# Where products are looked at: small weights are soon made.
_NARROW = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 256, "intermediate_size": 256}
_EXPERTS = {**_NARROW, "num_local_experts": 3}
# What one token has of DeepSeek V3's cache, and states as Qwen3-Next and Granite 4 have them.
_LATENTS = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 64,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_DELTA = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_SPACE = {
    "num_hidden_layers": 2,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 16,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
}
_UNLIKE = {
    "head_dim": 256,
    "global_head_dim": 512,
    "num_hidden_layers": 2,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
# The steps of every engine: tokens of each of three sequences.
_STEPS = ((40, 17, 0), (30, 1, 0), (0, 1, 5), (1, 1, 1), (1, 0, 1))
_FEW_STEPS = ((20, 17, 0), (0, 0, 5), (1, 1, 1))  # for forms of weights: what attention launches, others show
_PROMPTS, _FEW_PROMPTS = (70, 17, 5), (20, 17, 5)
# What engines look up by: experts' rows, and tokens.
_RUN = {"_choose", "_sort", "_sample"}


# As published: groups and blocks of 128.
_AWQ = CheckpointFormat({**FORMATS["awq"].config, "group_size": 128}, partial(awq_columns, group_size=128))
_BLOCKS = CheckpointFormat(
    {**FORMATS["fp8 in blocks"].config, "weight_block_size": [128, 128]}, partial(float8_blocks, block=128)
)


class Form(NamedTuple):
    """A model as it is served."""

    name: str
    family: str = "llama"
    dtype: str = "bfloat16"
    changes: dict[str, Any] = {}  # noqa: RUF012  (never changed)  of the model's configuration
    weights: CheckpointFormat | None = None
    cache: str | None = None
    has_adapter: bool = False


FORMS = (
    Form("bfloat16", changes=_WIDE),
    Form("float32", dtype="float32"),
    Form("FP8 cache", cache=FP8),
    Form("heads of 64", changes={"head_dim": 64}),
    Form(
        "heads of 256, a window", family="gemma3_text", changes={"head_dim": 256, "layer_types": ["sliding_attention"]}
    ),
    Form("norms of heads", family="qwen3"),
    Form("biases", family="opt", changes={"num_attention_heads": 8, "ffn_dim": 512, "head_dim": None}),
    Form("FP8", changes=_NARROW, weights=FORMATS["fp8"]),
    Form("FP8 in blocks", changes=_NARROW, weights=_BLOCKS),
    Form("4 bits", changes=_NARROW, weights=_AWQ),
    Form("4 bits in small groups", changes=_NARROW, weights=FORMATS["w4a16 in groups"]),
    Form("8 bits", changes=_NARROW, weights=FORMATS["w8a16"]),
    Form("experts", family="mixtral", changes=_EXPERTS),
    Form("experts of 4 bits", family="mixtral", changes=_EXPERTS, weights=_AWQ),
    Form("experts of FP8", family="mixtral", changes=_EXPERTS, weights=_BLOCKS),
    Form("adapters", has_adapter=True),
    Form("sinks", family="gpt_oss", changes={**_EXPERTS, "head_dim": 64, "layer_types": ["sliding_attention"]}),
    Form("capped scores", family="gemma2", changes={"head_dim": 256, "layer_types": ["sliding_attention"]}),
    Form("chunked attention", family="llama4_text", changes={**_EXPERTS, "moe_layers": [0], "layer_types": None}),
    Form("latents", family="deepseek_v3", changes=_LATENTS),
    Form("latents, FP8 cache", family="deepseek_v3", changes=_LATENTS, cache=FP8),
    Form("delta rule", family="qwen3_5_text", changes=_DELTA),
    Form("Mamba-2", family="granitemoehybrid_dense", changes=_SPACE),
    Form("short convolutions", family="lfm2", changes={"full_attn_idxs": [1], "num_hidden_layers": 2}),
    Form("heads of two sizes", family="gemma4_text", changes=_UNLIKE),
)


class _Zeroed(TorchFunctionMode):
    """Every tensor that is made within the context is zeros until it is written."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in (torch.empty, torch.empty_like, Tensor.new_empty) else made


class Recorder:
    """Notes each launch; plain JSON."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self._seen: set[str] = set()
        self.form = ""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note all launches within the context, and run those that others' arguments come from."""
        run = interpreter.InterpretedFunction.run

        def noted(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            self._note(kernel.fn, args, options)
            return run(kernel, *args, grid=grid, warmup=warmup, **options) if kernel.fn.__name__ in _RUN else None

        with patch.object(interpreter.InterpretedFunction, "run", noted), _Zeroed():
            yield

    def _note(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        named = {name: value for name, value in options.items() if name in inspect.signature(function).parameters}
        arguments = inspect.getcallargs(function, *args, **named)
        launch = {
            "module": function.__module__,
            "kernel": function.__name__,
            "arguments": {name: _plain(value) for name, value in arguments.items()},
            "options": {name: value for name, value in options.items() if name not in named},
        }
        key = json.dumps(launch, sort_keys=True)
        if key not in self._seen:
            self._seen.add(key)
            self.launches.append(launch | {"form": self.form})


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "is_aligned": value.data_ptr() % 16 == 0}
    assert value is None or isinstance(value, int | float | str), f"an argument that is a {type(value).__name__}"
    return value


def record(names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run the forms and the others of these names, or all; return the launches, each once."""
    recorder = Recorder()
    patch_once_per_kernel()
    with recorder.recording(), _as_on_a_gpu():
        for form in FORMS:
            if not names or form.name in names:
                recorder.form = form.name
                with tempfile.TemporaryDirectory() as folder:
                    run(form, Path(folder))
        for name, launch in OTHERS.items():
            if not names or name in names:
                recorder.form = name
                launch()
    return recorder.launches


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Take the kernels where a GPU does, and leave out those of CPUs."""
    with ExitStack() as stack:
        for module in (linear, file_products):
            stack.enter_context(patch.object(module, "packed_levels", lambda *_: ()))
        stack.enter_context(patch.object(linear, "_has_onednn", lambda *_: False))
        stack.enter_context(patch.object(feed_forward_weights, "has_experts_apart", lambda device: False))
        stack.enter_context(patch.object(Computing, "is_gpu", property(lambda _: True)))
        stack.enter_context(patch.object(source, "has_float8_products", lambda device: True))
        stack.enter_context(patch.object(gpu_dispatch, "wants_fused_kernels", lambda device: True))
        yield


def run(form: Form, folder: Path) -> None:
    """Compute prompts, chunks and decodes, drawn in every way."""
    reference = make_tiny_model(folder, form.family, **{**_SIZES, **form.changes})
    if form.weights is not None:
        quantize_folder(folder, form.weights)
    decoder = tiny_decoder(folder, form.dtype)
    storage = BlockStorage(
        decoder.config.block_layout(BLOCK_SIZE, form.cache or decoder.dtype_name), NUM_BLOCKS, has_scratch=True
    )
    storage.bytes.zero_()
    engine = Engine(
        model=decoder,
        storage=storage,
        options=EngineOptions(max_sequences=len(_PROMPTS), max_context_len=MAX_CONTEXT_LEN, attention=TRITON),
        capture=capture_nothing,
    )
    adapter = _adapter(decoder, folder, reference) if form.has_adapter else None
    engine.record_graphs(has_adapters=form.has_adapter)
    first, prompts = 0, _PROMPTS if form.weights is None else _FEW_PROMPTS
    for index, (length, sampling) in enumerate(zip(prompts, _sampling(), strict=True)):
        blocks = blocks_for(length + len(_STEPS), BLOCK_SIZE)
        own = (RequestId(str(index)), tuple(random_tokens(index, length)), length, 0)
        ids = tuple(BlockId(block) for block in range(first, first + blocks))
        engine.add_sequence(NewSequence(*own, ids, sampling, adapter=adapter if index != 1 else None))
        first += blocks
    for counts in _STEPS if form.weights is None else _FEW_STEPS:
        output = engine.execute([(RequestId(str(index)), count) for index, count in enumerate(counts) if count])
        assert not output.failed, f"{form.name}: logits that are no numbers"


def _sampling() -> tuple[SamplingParams, ...]:
    drawn: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 100}
    return (
        SamplingParams(temperature=0.0, max_tokens=100, num_logprobs=2, repetition_penalty=1.2),
        SamplingParams(top_p=0.9, **drawn),
        SamplingParams(top_k=20, min_p=0.01, logit_bias=((5, 1.0),), **drawn),
    )


def _adapter(decoder: Decoder, folder: Path, reference: Any) -> Any:
    write_adapter(folder / "adapter", reference, rank=16)
    files = read_adapter_files(folder / "adapter", 1 << 30)
    return load_adapter(files, decoder.config, decoder.dtype, decoder.device, max_rank=64)


def _copy_blocks() -> None:
    """Gather, scatter, copy and digest blocks of a size that an 8B Llama has, in one of its 32 layers."""
    blocks, ids = torch.zeros((8, 65536), dtype=torch.uint8), torch.tensor([3, 1, 6])
    staging = torch.empty((3, 65536), dtype=torch.uint8)
    gather_blocks(blocks, ids, staging)
    scatter_blocks(staging, blocks, ids)
    copy_listed(blocks, ids, torch.zeros_like(blocks), ids - 1)
    row_digests(staging)
    listed_digests(blocks, ids)


def _multiply_packed() -> None:
    """Multiply by weights in groups of 128, or 32 and 16 of floats, with every tiling, and unpack them, as for more
    rows."""
    for numbers in Numbers:
        weight = random_weight(numbers, torch.device("cpu"), 64, 256)
        linear = GroupedLinear(weight, dtype=torch.bfloat16)
        for num_rows in (*(tiling.rows for _, tiling in grouped_weights.TILINGS), UNPACKING_ROWS + 1):
            linear(torch.zeros((num_rows, 256), dtype=torch.bfloat16))


def _compute_wide_rows() -> None:
    """Gate and round rows of an 8B Llama and of wider ones; sort the choices of a long prompt."""
    gates = Gated("silu", torch.bfloat16, torch.device("cpu"))
    gates.round_results()
    for width in (14336, 28672):
        float8_inputs(gates(torch.zeros((1, 2 * width), dtype=torch.bfloat16)))
    expert_rows.sort(torch.zeros((1024, 8), dtype=torch.int32), 2)


def _mask_tokens() -> None:
    """Mask logits of an 8B Llama's vocabulary, and of one that is no multiple of 16."""
    for vocabulary, dtype in ((128256, torch.bfloat16), (32001, torch.bfloat16), (128256, torch.float32)):
        bits = torch.zeros((1, -(-vocabulary // 32)), dtype=torch.int32)
        mask_tokens_(torch.zeros((1, vocabulary), dtype=dtype), torch.zeros(1, dtype=torch.int64), bits)


def _try_all() -> None:
    """Launch what is tried before a kernel is used."""
    for module in pkgutil.walk_packages(kernels.gpu.__path__, "kernels.gpu."):
        found = importlib.import_module(module.name)
        if hasattr(found, "trial_launch"):
            found.trial_launch(torch.device("cpu"), torch.bfloat16)


OTHERS: dict[str, Callable[[], None]] = {
    "copies": _copy_blocks,
    "packed products": _multiply_packed,
    "wide rows": _compute_wide_rows,
    "masks": _mask_tokens,
    "trial launches": _try_all,
}


def main() -> None:
    """Record what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--shared-bytes", type=int, default=227 * 1024, help="that one program may have")
    parser.add_argument("--tensor-memory", action="store_true", help="products have a memory of their own for sums")
    parser.add_argument("--forms", nargs="*", default=[], choices=[[], *(form.name for form in FORMS), *OTHERS])
    arguments = parser.parse_args()
    with (
        patch.object(launching, "_SHARED_BYTES_OF_INTERPRETER", arguments.shared_bytes),
        patch.object(launching, "_TENSOR_MEMORY_OF_INTERPRETER", arguments.tensor_memory),
    ):
        launches = record(arguments.forms)
    arguments.file.write_text(json.dumps(launches))


if __name__ == "__main__":
    main()
