"""The forms of models and of steps that stand in the ledger."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.core.block_layout import FP8
from alignedserve.runtime.model.decoder.decoder_parts import ExpertConfig, HeadNormKind, RopeConfig
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.weights.packed_products import Float8Rows, GroupedRows, Rows
from alignedserve.runtime.model.weights.weight_source import WeightSource
from kernels.grouped_linear import GROUPS, GroupedWeight, Numbers
from lab.profiling.shapes import LLAMA_3_8B, TOY

GPU = torch.device("cuda:0")

MIXTRAL_8X7B = replace(
    LLAMA_3_8B,
    family="mixtral",
    vocab_size=32000,
    max_position_embeddings=32768,
    rope=RopeConfig(theta=1e6, rotary_dim=128),
    experts=ExpertConfig(num_experts=8, num_chosen=2, intermediate_size=14336, normalises=True),
    eos_token_ids=(2,),
)
QWEN3_30B_A3B = replace(
    LLAMA_3_8B,
    family="qwen3_moe",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    max_position_embeddings=40960,
    embedding_size=2048,
    norm_eps=1e-6,
    rope=RopeConfig(theta=1e6, rotary_dim=128),
    head_norm=HeadNormKind.HEADS,
    experts=ExpertConfig(num_experts=128, num_chosen=8, intermediate_size=768, normalises=True),
    eos_token_ids=(151645,),
)


class Weights(NamedTuple):
    """How the matrices of layers are stored; head and embeddings are in bfloat16, as checkpoints leave them."""

    name: str
    number_bytes: float  # of one number, scales and zero points included
    pack: Callable[[tuple[int, ...]], Rows] | None = None  # None: in bfloat16


def _float8_rows(shape: tuple[int, ...]) -> Rows:
    return Float8Rows(_empty(shape, torch.float8_e4m3fn), _empty(shape[:-1], torch.float32))


def _int4_rows(shape: tuple[int, ...]) -> Rows:
    group = next(size for size in reversed(GROUPS) if shape[-1] % size == 0)
    scales = (*shape[:-1], shape[-1] // group)
    words = _empty((*shape[:-1], shape[-1] // 2), torch.uint8)
    return GroupedRows(GroupedWeight(Numbers.INT4, words, _empty(scales, torch.float32), _empty(scales, torch.uint8)))


PLAIN = Weights("bfloat16", 2.0)
FLOAT8 = Weights("FP8 by row", 1.0, _float8_rows)
INT4 = Weights("4 bits in groups of 128", 0.5 + 5 / 128, _int4_rows)


@dataclass(frozen=True, slots=True)
class ModelForm:
    """A model as it is served."""

    name: str
    config: ModelConfig
    weights: Weights = PLAIN
    cache: str | None = None  # None: the dtype of the model
    num_adapters: int = 0  # LoRA adapters of rank 16, which all requests have in turn
    has_grammar: bool = False


@dataclass(frozen=True, slots=True)
class StepForm:
    """What a step computes: decodes of some contexts, and the prompt of one more."""

    name: str
    num_decodes: int
    context_len: int  # of each decode, its new token included
    prompt_len: int = 0  # of which the last `chunk_len` tokens are computed
    chunk_len: int = 0  # 0: all
    is_ahead: bool = False  # launched before the tokens of the step before it are on the host


DENSE = ModelForm("8B, bfloat16", LLAMA_3_8B)
NARROW = ModelForm("8B, FP8 weights", LLAMA_3_8B, FLOAT8)
NARROWER = ModelForm("8B, FP8 weights and cache", LLAMA_3_8B, FLOAT8, FP8)
QWEN3 = ModelForm("Qwen3-30B-A3B, bfloat16", QWEN3_30B_A3B)
MODELS = (
    DENSE,
    NARROW,
    NARROWER,
    ModelForm("8B, 4 bits", LLAMA_3_8B, INT4),
    ModelForm("8B, bfloat16, 8 LoRA adapters", LLAMA_3_8B, num_adapters=8),
    ModelForm("8B, bfloat16, grammars", LLAMA_3_8B, has_grammar=True),
    QWEN3,
    ModelForm("Mixtral 8x7B, bfloat16", MIXTRAL_8X7B),
)
PROMPT = StepForm("prompt, 4096 tokens", 0, 0, prompt_len=4096)
MIXED = StepForm("mixed, 255 x 1024 and 1024 tokens", 255, 1024, prompt_len=1024)
MIXED_AHEAD = StepForm("mixed, launched ahead", 255, 1024, prompt_len=4096, chunk_len=1024, is_ahead=True)
DECODE = StepForm("decode, 256 x 1024", 256, 1024)
ONE, FEW, CHATS, LONG, MANY = (
    StepForm(f"launched ahead, {count} x {length}", count, length, is_ahead=True)
    for count, length in ((1, 2048), (8, 1024), (64, 512), (64, 2048), (256, 1024))
)
STEPS = (PROMPT, MIXED, MIXED_AHEAD, DECODE, ONE, FEW, CHATS, LONG, MANY)
TOY_MODEL = ModelForm("toy", TOY)


class EmptySource(WeightSource):
    """Weights without content of any name and shape."""

    def __init__(self, form: ModelForm, dtype: torch.dtype) -> None:
        super().__init__(dtype, torch.device(GPU))
        self._pack = form.weights.pack

    @override
    def has(self, name: str) -> bool:
        return not name.startswith("decoder.")

    @override
    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        del name
        return _empty(shape, self.dtype)

    @override
    def packed(self, name: str, shape: tuple[int, ...]) -> Rows | None:
        is_outer = "lm_head" in name or "embed" in name or ".gate." in name
        return None if self._pack is None or is_outer else self._pack(shape)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=GPU)
