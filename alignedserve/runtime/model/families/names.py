"""The names of tensors in the files of each family of decoders."""

from dataclasses import replace

from alignedserve.runtime.model.weight_names import ExtraNames, ParameterNames

LLAMA = ParameterNames(
    prefixes=("model.", ""),
    embedding="embed_tokens",
    final_norm="norm",
    lm_heads=("lm_head",),
    layer="layers.{layer}.",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.o_proj",
    gate_up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
)
# Its rotation turns neighbouring elements of a head.
PAIRED_LLAMA = replace(LLAMA, interleaves_pairs=True)

MIXTRAL = replace(
    LLAMA,
    router="block_sparse_moe.gate",
    expert_gate_up=("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
    expert_down="block_sparse_moe.experts.{expert}.w2",
)

QWEN3_MOE = replace(
    LLAMA,
    router="mlp.gate",
    expert_gate_up=("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
    expert_down="mlp.experts.{expert}.down_proj",
)

QWEN2_MOE = replace(
    QWEN3_MOE,
    shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
)
# With DeepSeek's way of choosing experts, and one that every token passes.
GLM4_MOE = replace(
    QWEN3_MOE,
    router_correction="mlp.gate.e_score_correction_bias",
    shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
)

# One tensor of each kind for all experts.
GPT_OSS = replace(
    LLAMA,
    router="mlp.router",
    expert_gate_up=("mlp.experts.gate_up_proj.{expert}",),
    expert_down="mlp.experts.down_proj.{expert}",
    transposes_experts=True,
    interleaves_gates=True,
    sinks="self_attn.sinks",
)

LLAMA4 = replace(
    PAIRED_LLAMA,
    prefixes=("model.", "language_model.model.", "model.language_model.", ""),
    lm_heads=("lm_head", "language_model.lm_head"),
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    router="feed_forward.router",
    expert_gate_up=("feed_forward.experts.gate_up_proj.{expert}",),
    expert_down="feed_forward.experts.down_proj.{expert}",
    transposes_experts=True,
    shared_gate_up=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
    shared_down="feed_forward.shared_expert.down_proj",
)

LATENT = replace(
    PAIRED_LLAMA,
    qkv=(),
    query=("self_attn.q_proj", "self_attn.q_a_proj", "self_attn.q_b_proj"),
    query_row_norm="self_attn.q_a_layernorm",
    latent="self_attn.kv_a_proj_with_mqa",
    latent_norm="self_attn.kv_a_layernorm",
    heads_of_latent="self_attn.kv_b_proj",
)
DEEPSEEK_V2 = replace(
    LATENT,
    router=GLM4_MOE.router,
    expert_gate_up=GLM4_MOE.expert_gate_up,
    expert_down=GLM4_MOE.expert_down,
    shared_gate_up=GLM4_MOE.shared_gate_up,
    shared_down=GLM4_MOE.shared_down,
)
DEEPSEEK_V3 = replace(DEEPSEEK_V2, router_correction=GLM4_MOE.router_correction)

MINIMAX_M2 = replace(MIXTRAL, router_correction="block_sparse_moe.e_score_correction_bias")
GRANITE_MOE = replace(
    LLAMA,
    router="block_sparse_moe.router.layer",
    expert_gate_up=("block_sparse_moe.input_linear.{expert}",),
    expert_down="block_sparse_moe.output_linear.{expert}",
    shared_gate_up=("shared_mlp.input_linear",),
    shared_down="shared_mlp.output_linear",
)

PHI3 = replace(LLAMA, qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))

GEMMA3 = replace(
    LLAMA,
    prefixes=("model.", "language_model.model.", "model.language_model.", ""),
    mlp_norm="pre_feedforward_layernorm",
    attention_post_norm="post_attention_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)

GEMMA3N = replace(GEMMA3, extras=ExtraNames())
GEMMA4 = replace(
    GEMMA3N,
    router="router.proj",
    expert_gate_up=("experts.gate_up_proj.{expert}",),
    expert_down="experts.down_proj.{expert}",
)

IDEFICS3 = replace(LLAMA, prefixes=("model.text_model.",))
QWEN_VL = replace(LLAMA, prefixes=("model.language_model.", "model."))
QWEN_VL_MOE = replace(
    QWEN_VL,
    router=QWEN3_MOE.router,
    expert_gate_up=("mlp.experts.gate_up_proj.{expert}",),
    expert_down="mlp.experts.down_proj.{expert}",
    transposes_experts=True,
)
MISTRAL3 = replace(
    LLAMA, prefixes=("model.language_model.", "language_model.model."), lm_heads=("lm_head", "language_model.lm_head")
)

# Norms behind the parts of a layer alone.
OLMO2 = replace(
    LLAMA,
    attention_norm="",
    mlp_norm="",
    attention_post_norm="post_attention_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
FLEX_OLMO = replace(
    OLMO2, router=QWEN3_MOE.router, expert_gate_up=QWEN3_MOE.expert_gate_up, expert_down=QWEN3_MOE.expert_down
)

HUNYUAN = replace(LLAMA, query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")

COHERE = replace(PAIRED_LLAMA, mlp_norm="input_layernorm")

GLM = replace(PAIRED_LLAMA, gate_up=("mlp.gate_up_proj",))
GLM4 = replace(GLM, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm")

NEMOTRON = replace(LLAMA, gate_up=("mlp.up_proj",))

STARCODER2 = replace(LLAMA, gate_up=("mlp.c_fc",), down="mlp.c_proj")

OPT = ParameterNames(
    prefixes=("model.decoder.", "decoder."),
    embedding="embed_tokens",
    final_norm="final_layer_norm",
    lm_heads=("lm_head",),
    layer="layers.{layer}.",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.out_proj",
    gate_up=("fc1",),
    down="fc2",
    positions="embed_positions",
    project_in="project_in",
    project_out="project_out",
)

GPT_NEOX = ParameterNames(
    prefixes=("gpt_neox.", ""),
    embedding="embed_in",
    final_norm="final_layer_norm",
    lm_heads=("embed_out", "lm_head"),
    layer="layers.{layer}.",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv=("attention.query_key_value",),
    interleaves_heads=True,
    output="attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)

LFM2 = replace(
    LLAMA,
    final_norm="embedding_norm",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    output="self_attn.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    mixer_inputs=("conv.in_proj",),
    mixer_output="conv.out_proj",
    mixer="conv.",
)
LFM2_MOE = replace(
    LFM2,
    router="feed_forward.gate",
    router_correction="feed_forward.expert_bias",
    expert_gate_up=("feed_forward.experts.{expert}.w1", "feed_forward.experts.{expert}.w3"),
    expert_down="feed_forward.experts.{expert}.w2",
)

GRANITE_HYBRID = replace(
    GRANITE_MOE,
    gate_up=GRANITE_MOE.shared_gate_up,
    down=GRANITE_MOE.shared_down,
    mixer_inputs=("mamba.in_proj",),
    mixer_output="mamba.out_proj",
    mixer="mamba.",
)
BAMBA = replace(
    LLAMA,
    final_norm="final_layernorm",
    mlp_norm="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    mixer_inputs=GRANITE_HYBRID.mixer_inputs,
    mixer_output=GRANITE_HYBRID.mixer_output,
    mixer="mamba.",
)

QWEN3_NEXT = replace(
    QWEN2_MOE,
    mixer_inputs=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
    mixer_output="linear_attn.out_proj",
    mixer="linear_attn.",
)
QWEN3_5 = replace(
    QWEN3_NEXT,
    prefixes=("model.", "model.language_model.", "language_model.model.", ""),
    mixer_inputs=tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")),
)

# One part of a layer after the other, each with a norm of the same name.
NEMOTRON_H = replace(
    LLAMA,
    prefixes=("backbone.", "model.", ""),
    embedding="embeddings",
    final_norm="norm_f",
    attention_norm="norm",
    mlp_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    output="mixer.o_proj",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    router="mixer.gate",
    router_correction="mixer.gate.e_score_correction_bias",
    expert_gate_up=("mixer.experts.{expert}.up_proj",),
    expert_down="mixer.experts.{expert}.down_proj",
    shared_gate_up=("mixer.shared_experts.up_proj",),
    shared_down="mixer.shared_experts.down_proj",
    mixer_inputs=("mixer.in_proj",),
    mixer_output="mixer.out_proj",
    mixer="mixer.",
)
