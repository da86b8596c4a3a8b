"""Model shapes for benchmarks with random weights: no files needed."""

from dataclasses import replace

from alignedserve.runtime.model.decoder.decoder_parts import Activation, NormKind, RopeConfig
from alignedserve.runtime.model.decoder.model_config import ModelConfig

OPT_125M = ModelConfig(
    family="opt",
    vocab_size=50272,
    hidden_size=768,
    intermediate_size=3072,
    num_layers=12,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    max_position_embeddings=2048,
    activation=Activation.RELU,
    norm=NormKind.LAYER,
    norm_eps=1e-5,
    embedding_size=768,
    dtype="float16",
    position_offset=2,
    is_gated=False,
    has_qkv_bias=True,
    has_output_bias=True,
    has_mlp_bias=True,
    ties_embeddings=True,
    eos_token_ids=(2,),
)

LLAMA_0_5B = ModelConfig(
    family="llama",
    vocab_size=32000,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=32768,
    activation=Activation.SILU,
    norm=NormKind.RMS,
    norm_eps=1e-6,
    embedding_size=896,
    dtype="bfloat16",
    rope=RopeConfig(theta=1e6, rotary_dim=64),
    ties_embeddings=True,
    eos_token_ids=(2,),
)

LLAMA_3_8B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    activation=Activation.SILU,
    norm=NormKind.RMS,
    norm_eps=1e-5,
    embedding_size=4096,
    dtype="bfloat16",
    rope=RopeConfig(theta=5e5, rotary_dim=128),
    eos_token_ids=(128001,),
)

LLAMA_3_1B = replace(
    LLAMA_3_8B,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    head_dim=64,
    embedding_size=2048,
    rope=RopeConfig(theta=5e5, rotary_dim=64),
    ties_embeddings=True,
)

# So small that a benchmark on a CPU, or in an interpreter, shows within seconds whether it runs at all.
TOY = replace(
    LLAMA_3_8B,
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
    embedding_size=64,
    dtype="float32",
    rope=RopeConfig(theta=1e4, rotary_dim=16),
    eos_token_ids=(2,),
)

SHAPES = {
    "opt-125m": OPT_125M,
    "llama-0.5b": LLAMA_0_5B,
    "llama-3-1b": LLAMA_3_1B,
    "llama-3-8b": LLAMA_3_8B,
    "toy": TOY,
}
