"""Models with every kind of layers at published widths, a few layers of each with random weights, beside transformers.

Sinks and experts (gpt-oss 20B), latents and experts (DeepSeek V3, eight experts of 256), capped scores (Gemma 2 9B),
chunks and experts (Llama 4 Scout, four experts of 16), the gated delta rule (Qwen3.5), Mamba-2 (Granite 4), short
convolutions (LFM2), heads of two sizes (Gemma 4). Where a model has windows beside full attention, its cache is timed
whole and in rings. Ours is the engine, with recorded decode steps; transformers' is its
forward pass and `generate`, as they come. Tokens a second: of a prompt, and of decodes by streams.
"""

import importlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.attention.ring_tables import num_scratch_blocks
from alignedserve.runtime.device.device_work import synchronize
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.engine.engine import Engine, NewSequence
from alignedserve.runtime.engine.engine_options import EngineOptions, OwnBlocks
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.hf_config import read_model_config
from alignedserve.runtime.model.weight_files import load_weights

_SAMPLING = SamplingParams(temperature=0.0, max_tokens=100_000, ignore_eos=True)
_COMMON: dict[str, Any] = {"vocab_size": 32_000, "max_position_embeddings": 8192, "num_hidden_layers": 4}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": (
        "GptOssConfig",
        {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8}
        | {"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {"hidden_size": 7168, "intermediate_size": 18_432, "num_attention_heads": 128, "num_key_value_heads": 128}
        | {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
        | {"v_head_dim": 128, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
        | {"moe_intermediate_size": 2048, "first_k_dense_replace": 1},
    ),
    "gemma2": (
        "Gemma2Config",
        {"hidden_size": 3584, "intermediate_size": 14_336, "num_attention_heads": 16, "num_key_value_heads": 8}
        | {"head_dim": 256, "query_pre_attn_scalar": 256},
    ),
    "llama4_text": (
        "Llama4TextConfig",
        {"hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16_384, "head_dim": 128}
        | {"num_attention_heads": 40, "num_key_value_heads": 8, "num_local_experts": 4, "attention_chunk_size": 512},
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {"hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 16, "num_key_value_heads": 4}
        | {"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
    ),
    "granite4": (
        "GraniteMoeHybridConfig",
        {"hidden_size": 2048, "shared_intermediate_size": 8192, "num_local_experts": 0, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128}
        | {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    ),
    "lfm2": (
        "Lfm2Config",
        {"hidden_size": 2048, "intermediate_size": 12_288, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"full_attn_idxs": [2], "block_auto_adjust_ff_dim": False},
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {"hidden_size": 2560, "intermediate_size": 10_240, "num_attention_heads": 8, "num_key_value_heads": 2}
        | {"head_dim": 256, "global_head_dim": 512, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0}
        | {"vocab_size_per_layer_input": 32_000, "sliding_window": 512}
        | {"layer_types": [*["sliding_attention"] * 3, "full_attention"]},
    ),
}
_ERRORS = (AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)


class Sizes(NamedTuple):
    """Tokens and streams of the comparison."""

    prompt: int
    context: int  # of each stream
    streams: int
    steps: int
    rounds: int


_REAL, _TOY = Sizes(2048, 1024, 64, 16, 3), Sizes(12, 8, 2, 2, 1)


def measure_kinds(
    device: torch.device, *, is_toy: bool, on_measured: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Return tokens a second by kind and side; told after each."""
    sizes, dtype = (_TOY, "float32") if is_toy else (_REAL, "bfloat16")
    figures: dict[str, Any] = {"dtype": dtype, **sizes._asdict(), "kinds": {}, "failures": [], "left_out": []}
    for name in list(KINDS)[: 1 if is_toy else None]:
        try:
            figures["kinds"][name] = own = _compared(name, sizes, dtype, device, is_toy=is_toy)
            print(name, {side: {key: round(rate) for key, rate in own[side].items()} for side in own}, flush=True)
        except _ERRORS as error:
            figures["failures"].append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            print(figures["failures"][-1], flush=True)
        on_measured(figures)
    return figures


def _compared(name: str, sizes: Sizes, dtype: str, device: torch.device, *, is_toy: bool) -> dict[str, Any]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = importlib.import_module("transformers")
    class_name, widths = KINDS[name]
    if is_toy:
        widths = widths | {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "num_local_experts": 4}
    config = getattr(transformers, class_name)(**_COMMON | widths)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        ours = {"alignedserve": _Own(Path(folder), sizes, dtype, device).rates()}
        if read_model_config(Path(folder)).may_have_rings:
            ours["rings"] = _Own(Path(folder), sizes, dtype, device, has_rings=True).rates()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        theirs = _theirs(transformers, config, sizes, dtype, device)
    except _ERRORS as error:  # what comes with transformers may not be all that a kind needs
        print(f"transformers, {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        theirs = {}
    return {**ours, "transformers": theirs}


class _Own:
    """The engine."""

    def __init__(
        self, folder: Path, sizes: Sizes, dtype: str, device: torch.device, *, has_rings: bool = False
    ) -> None:
        config = read_model_config(folder)
        self._sizes, self._device = sizes, device
        # Where a block has states a request has one block: the engine's tests have the others.
        longest = max(sizes.prompt, sizes.context + sizes.rounds * sizes.steps + sizes.steps) + 2
        layout = config.block_layout(16 if config.state is None else 1 << (longest - 1).bit_length(), dtype)
        if has_rings:
            layout = config.layout_of_rings(layout)
        self._width, num_requests = layout.blocks_for(longest), sizes.streams + 1
        num_blocks, num_scratch = num_requests * self._width, num_scratch_blocks(layout, sizes.prompt, num_requests)
        self._engine = Engine(
            model=Decoder(config, load_weights(None, config, torch_dtype(dtype), device)),
            storage=BlockStorage(layout, num_blocks + num_scratch, device),
            options=EngineOptions(max_sequences=num_requests, max_context_len=longest),
            own_blocks=OwnBlocks(ring_scratch=[BlockId(num_blocks + index) for index in range(num_scratch)]),
        )

    def rates(self) -> dict[str, float]:
        """Return tokens a second of a prompt, of one stream and of all."""
        sizes = self._sizes
        return {"prompt": self._prompt(), "1": self._decodes(1), f"{sizes.streams}": self._decodes(sizes.streams)}

    def _prompt(self) -> float:
        taken = []
        for _ in range(self._sizes.rounds + 1):
            self._add(0, self._sizes.prompt)
            began_s = time.perf_counter()
            self._engine.execute([(RequestId("0"), self._sizes.prompt)])
            taken.append(time.perf_counter() - began_s)
            self._remove(0)
        return self._sizes.prompt / statistics.median(taken[1:])

    def _decodes(self, count: int) -> float:
        sizes = self._sizes
        for stream in range(count):
            self._add(stream, sizes.context)
            self._engine.execute([(RequestId(str(stream)), sizes.context)], may_go_on=False)
        slices, taken = [(RequestId(str(stream)), 1) for stream in range(count)], []
        for _ in range(sizes.rounds + 1):
            began_s = time.perf_counter()
            for _ in range(sizes.steps):
                self._engine.execute(slices)
            taken.append(time.perf_counter() - began_s)
        for stream in range(count):
            self._remove(stream)
        return count * sizes.steps / statistics.median(taken[1:])

    def _add(self, stream: int, length: int) -> None:
        tokens = tuple(3 + (7 * stream + place) % 31_000 for place in range(length))
        first = stream * self._width
        blocks = tuple(BlockId(first + block) for block in range(self._width))
        self._engine.add_sequence(NewSequence(RequestId(str(stream)), tokens, length, 0, blocks, _SAMPLING))

    def _remove(self, stream: int) -> None:
        self._engine.settle()
        self._engine.remove_sequence(RequestId(str(stream)))


@torch.inference_mode()
def _theirs(transformers: Any, config: Any, sizes: Sizes, dtype: str, device: torch.device) -> dict[str, float]:
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch_dtype(dtype)).eval()
    prompt = torch.randint(4, config.vocab_size, (1, sizes.prompt), device=device)
    taken = [_seconds(lambda: model(prompt, logits_to_keep=1), device) for _ in range(sizes.rounds + 1)]
    rates = {"prompt": sizes.prompt / statistics.median(taken[1:])}
    for count in (1, sizes.streams):
        # Decodes alone: what more tokens take than fewer.
        few, many = (list(_generations(model, count, sizes, steps, device)) for steps in (2, sizes.steps + 2))
        rates[f"{count}"] = count * sizes.steps / (statistics.median(many[1:]) - statistics.median(few[1:]))
    return rates


def _generations(model: Any, count: int, sizes: Sizes, steps: int, device: torch.device) -> Iterator[float]:
    prompts = torch.randint(4, model.config.vocab_size, (count, sizes.context), device=device)
    options = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False, "eos_token_id": None}
    for _ in range(sizes.rounds + 1):
        yield _seconds(
            lambda: model.generate(prompts, attention_mask=torch.ones_like(prompts), pad_token_id=0, **options), device
        )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    began_s = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began_s
