"""Model shapes for benchmarks with random weights: no files needed."""

from alignedserve.runtime.model_config import Activation, Family, ModelConfig, NormKind, RopeConfig

OPT_125M = ModelConfig(
    family=Family.OPT,
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
    family=Family.LLAMA,
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

SHAPES = {"opt-125m": OPT_125M, "llama-0.5b": LLAMA_0_5B}
