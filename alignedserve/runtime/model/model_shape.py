"""A model's config as the cost models see it."""

from alignedserve.costmodel.model_shapes import ModelShape
from alignedserve.runtime.model.model_config import ModelConfig


def shape_of(name: str, config: ModelConfig, dtype: str) -> ModelShape:
    """The sizes of a config in the dtype that it is served in. Embeddings count as wide as the hidden state."""
    return ModelShape(
        name=name,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        is_gated=config.is_gated,
        ties_embeddings=config.ties_embeddings,
        num_positions=0 if config.rope else config.max_position_embeddings + config.position_offset,
        dtype=dtype,
    )
