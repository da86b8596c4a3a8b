"""The names of tensors in the files of models that see: of their towers, and of what makes prompt tokens of patches."""

from dataclasses import replace

from plugins.vision.vision_config import PairOrder, VisionNames

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# SigLIP's, whose connectors differ.
_SIGLIP = VisionNames(
    prefixes=("model.",),
    patches="embeddings.patch_embedding",
    positions="embeddings.position_embedding.weight",
    layer="encoder.layers.{layer}.",
    attention_norm="layer_norm1",
    qkv=_QKV,
    output="self_attn.out_proj",
    mlp_norm="layer_norm2",
    up=("mlp.fc1",),
    down="mlp.fc2",
    last_norm="post_layernorm",
    connector=(),
)

IDEFICS3 = replace(_SIGLIP, inside=("vision_model.",), connector=("connector.modality_projection.proj",))
GEMMA = replace(
    _SIGLIP,
    prefixes=("model.", ""),
    inside=("vision_tower.", "vision_tower.vision_model."),
    connector_norm="multi_modal_projector.mm_soft_emb_norm",
    connector=("multi_modal_projector.mm_input_projection_weight",),
    transposes_connector=True,
)
PIXTRAL = VisionNames(
    prefixes=("model.", ""),
    patches="vision_tower.patch_conv",
    first_norm="vision_tower.ln_pre",
    layer="vision_tower.transformer.layers.{layer}.",
    attention_norm="attention_norm",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    output="attention.o_proj",
    mlp_norm="ffn_norm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    connector=("multi_modal_projector.linear_1", "multi_modal_projector.linear_2"),
)
MISTRAL3 = replace(
    PIXTRAL, connector_norm="multi_modal_projector.norm", merger="multi_modal_projector.patch_merger.merging_layer"
)
QWEN = VisionNames(
    prefixes=("model.visual.", "visual."),
    patches="patch_embed.proj",
    layer="blocks.{layer}.",
    attention_norm="norm1",
    qkv=("attn.qkv",),
    output="attn.proj",
    mlp_norm="norm2",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    connector_norm="merger.ln_q",
    connector=("merger.mlp.0", "merger.mlp.2"),
)
QWEN3 = replace(
    QWEN,
    positions="pos_embed.weight",
    up=("mlp.linear_fc1",),
    down="mlp.linear_fc2",
    connector_norm="merger.norm",
    connector=("merger.linear_fc1", "merger.linear_fc2"),
    deep_norm="deepstack_merger_list.{level}.norm",
    deep=("deepstack_merger_list.{level}.linear_fc1", "deepstack_merger_list.{level}.linear_fc2"),
)
LLAMA4 = VisionNames(
    prefixes=("", "model."),
    patches="vision_model.patch_embedding.linear",
    has_flat_patches=True,
    positions="vision_model.positional_embedding_vlm",
    class_token="vision_model.class_embedding",  # noqa: S106  (no password)
    first_norm="vision_model.layernorm_pre",
    layer="vision_model.model.layers.{layer}.",
    attention_norm="input_layernorm",
    qkv=_QKV,
    pairs=PairOrder.NEIGHBOURS,
    output="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    up=("mlp.fc1",),
    down="mlp.fc2",
    last_norm="vision_model.layernorm_post",
    connector=(
        "vision_model.vision_adapter.mlp.fc1",
        "vision_model.vision_adapter.mlp.fc2",
        "multi_modal_projector.linear_1",
    ),
)
GEMMA4 = VisionNames(
    prefixes=("model.", ""),
    inside=("vision_tower.",),
    patches="patch_embedder.input_proj",
    has_flat_patches=True,
    has_pixels_last=True,
    positions="patch_embedder.position_embedding_table",
    layer="encoder.layers.{layer}.",
    attention_norm="input_layernorm",
    qkv=tuple(f"{name}.linear" for name in _QKV),
    pairs=PairOrder.QUARTERS,
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    output="self_attn.o_proj.linear",
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    up=("mlp.gate_proj.linear", "mlp.up_proj.linear"),
    down="mlp.down_proj.linear",
    mlp_post_norm="post_feedforward_layernorm",
    connector=("embed_vision.embedding_projection",),
)
