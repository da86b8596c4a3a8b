"""config.json: both generations of it, every family's sizes, and whatever a hostile file may hold."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from alignedserve.config.sections import EngineConfig, ModelSectionConfig
from alignedserve.core.errors import AlignedServeError, ConfigError, ModelError, ModelNotFound, UnsupportedModel
from alignedserve.runtime.model.decoder.decoder_parts import Activation, RopeScaling
from alignedserve.runtime.model.encoder.encoder_config import HeadActivation, Pooling
from alignedserve.runtime.model.encoder.encoder_weights import load_encoder_weights
from alignedserve.runtime.model.model_files import parse_model_config, read_any_config, read_model_config
from alignedserve.runtime.model.served_model import ServedModel, resolve_model
from tests.support.marks import each
from tests.support.models.tiny_encoders import make_tiny_encoder, write_sentence_files, write_tokenizer
from tests.support.models.tiny_models import TINY_MODELS, make_tiny_model

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("family", list(TINY_MODELS))
def test_parameters_are_counted_like_transformers(family: str, tmp_path: Path) -> None:
    reference = make_tiny_model(tmp_path, family)
    config = read_model_config(tmp_path)
    assert config.num_parameters == sum(parameter.numel() for parameter in reference.parameters())
    assert config.eos_token_ids == (2,)


def test_old_and_new_spellings_read_alike() -> None:
    old = parse_model_config(
        {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}, "torch_dtype": "bfloat16"}
    )
    new = parse_model_config(
        {**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, "dtype": "bfloat16"}
    )
    assert old == new
    assert old.rope is not None
    assert (old.rope.theta, old.rope.scaling, old.rope.factor) == (5e5, RopeScaling.LLAMA3, 8.0)


def test_sliding_windows() -> None:
    mistral = {**LLAMA, "model_type": "mistral"}
    assert parse_model_config(mistral).sliding_window == 4096
    assert parse_model_config({**mistral, "sliding_window": None}).sliding_window is None
    assert parse_model_config({**mistral, "sliding_window": 8}).windowed_layers == (0, 1)
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 8, "max_window_layers": 1}
    assert parse_model_config(qwen).sliding_window is None
    assert parse_model_config({**qwen, "use_sliding_window": True}).windowed_layers == (1,)


GEMMA3: dict[str, Any] = {
    **LLAMA,
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "head_dim": 32,
    "sliding_window": 16,
    "query_pre_attn_scalar": 128,
}


@each(
    ("given", "expected"),
    [
        ({}, Activation.GELU_TANH),
        ({"hidden_act": "gelu"}, Activation.GELU_TANH),  # as the first releases say, which mean the approximation
        ({"hidden_act": "gelu", "hidden_activation": None}, Activation.GELU_TANH),
        ({"hidden_act": "silu"}, Activation.SILU),
        ({"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "silu"}, Activation.GELU_TANH),
    ],
)
def test_the_first_gemma_has_the_activation_that_transformers_computes(
    given: dict[str, object], expected: Activation
) -> None:
    assert parse_model_config({**LLAMA, "model_type": "gemma", "head_dim": 16, **given}).activation is expected


def test_gemma3() -> None:
    """The spelling of published configs and that of transformers today."""
    old = {"rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    types = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    sections = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    config = parse_model_config({**GEMMA3, **old})
    assert config == parse_model_config({**GEMMA3, "layer_types": types, "rope_parameters": sections})
    assert (config.sliding_window, config.windowed_layers) == (16, (0, 1, 2, 3, 4, 6))
    full, windowed = config.rope_of(5), config.rope_of(0)
    assert full is not None
    assert windowed is not None
    assert (full.theta, full.factor, windowed.theta, windowed.scaling) == (2e6, 8.0, 2e4, RopeScaling.NONE)
    assert (config.embedding_multiplier, config.query_multiplier) == (8.0, 0.5)
    assert config.ties_embeddings
    assert parse_model_config({**GEMMA3, "sliding_window_pattern": 2}).windowed_layers == (0, 2, 4, 6)


def test_gemma3_with_images() -> None:
    """The text part alone is read; published configs leave out what is common to all sizes."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = parse_model_config(
        {"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16", "eos_token_id": [1, 106]}
    )
    assert (config.dtype, config.eos_token_ids, config.head_dim, config.num_kv_heads) == ("bfloat16", (1, 106), 256, 4)
    assert config.num_parameters == 3_880_263_168
    with pytest.raises(ModelError, match="text_config"):
        parse_model_config({"model_type": "gemma3"})
    with pytest.raises(ModelError, match="rope_parameters"):
        parse_model_config({**GEMMA3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})


QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "torch_dtype": "bfloat16",
}


def test_experts() -> None:
    config = parse_model_config(QWEN3_30B_A3B)
    assert config.experts is not None
    assert config.num_parameters == 30_532_122_624
    assert config.num_multiplied == config.num_projected - 48 * 120 * 3 * 2048 * 768
    shape = config.shape("qwen3-30b-a3b", "bfloat16")
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    assert shape.num_parameters + norms == config.num_parameters
    assert shape.token_parameters + shape.head_parameters + norms == config.num_multiplied
    assert shape.read_parameters(1) == pytest.approx(shape.token_parameters, rel=1e-9)
    assert shape.token_parameters < shape.read_parameters(16) < 0.66 * shape.layer_parameters
    assert shape.read_parameters(10_000) == pytest.approx(shape.layer_parameters)
    routers = 48 * 2048 * 128  # float32
    assert config.loaded_weight_bytes("bfloat16") == 2 * config.num_parameters + 2 * routers
    embedding = 151936 * 2048
    rest = config.num_parameters - embedding - routers
    assert config.loaded_weight_bytes("bfloat16", "int8") == 2 * embedding + rest + 4 * routers


def test_layers_without_experts() -> None:
    changes = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    config = parse_model_config({**QWEN3_30B_A3B, **changes})
    assert [layer for layer in range(6) if config.experts_of(layer)] == [1, 5]
    assert config.shape("x", "bfloat16").num_expert_layers == 2


def test_end_tokens_of_the_generation_config_win(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 5}))
    assert read_model_config(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert read_model_config(tmp_path).eos_token_ids == (7, 9)
    for none in (-1, 100, [-1], []):  # ids outside of the vocabulary end nothing
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": none}))
        assert read_model_config(tmp_path).eos_token_ids == (5,)


def test_the_tokenizers_own_end_token_ends_answers_too(tmp_path: Path) -> None:
    """Fine-tuned models are published whose config.json has the base model's end alone."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 5}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert read_model_config(tmp_path).eos_token_ids == (5,)
    for token_id, expected in ((7, (5, 7)), (5, (5,)), (100, (5,))):  # the last has no row in the embedding
        added = {"added_tokens": [{"id": 3, "content": "<s>"}, {"id": token_id, "content": "<|im_end|>"}]}
        (tmp_path / "tokenizer.json").write_text(json.dumps(added))
        assert read_model_config(tmp_path).eos_token_ids == expected
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    assert read_model_config(tmp_path).eos_token_ids == (5,)


REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())
BASES = {
    "llama": (LLAMA, ModelError),
    "qwen3_30b_a3b": (QWEN3_30B_A3B, ModelError),
    "unsupported": (LLAMA, UnsupportedModel),
}


@each(("base", "changes", "problem"), [(base, *row) for base in BASES for row in REFUSED[base]])
def test_what_is_refused_is_named(base: str, changes: dict[str, object], problem: str) -> None:
    fields, error = BASES[base]
    with pytest.raises(error, match=problem):
        parse_model_config({**fields, **changes})


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"vocab_size": ' + b"9" * 5000 + b"}", b"3"]
)
def test_files_that_are_not_a_json_object(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_a_huge_config_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match="larger than"):
        read_model_config(tmp_path)


def test_missing_folders_and_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        read_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        read_model_config(tmp_path)


@each(
    ("name", "ending"),
    [
        ("pockt", r" Short names: pocket\."),
        ("smolm2", r" Short names: smollm2, smollm2:360m\."),
        ("zzz", r" Short names: pocket, smollm2, .*, minilm\."),
        ("/models/pockt", r"Qwen3-0\.6B\)\."),
    ],
)
def test_a_word_that_is_no_folder_is_answered_with_the_short_names_that_it_may_mean(name: str, ending: str) -> None:
    with pytest.raises(ModelNotFound, match=f"neither a folder here .*{ending}$"):
        read_model_config(Path(name))


def test_reading_a_config_does_not_import_torch() -> None:
    program = "import sys, alignedserve.runtime.model.model_files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# What a folder of an encoder says, and what is refused of it.

BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 100,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "type_vocab_size": 2,
}
MODULES = [
    {"type": "sentence_transformers.models.Transformer", "path": ""},
    {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
]
MEAN = {"pooling_mode_mean_tokens": True}


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def served(folder: Path, **section: Any) -> ServedModel:
    return resolve_model(ModelSectionConfig(path=str(folder), **section))


def test_texts_are_as_long_as_in_training(tmp_path: Path) -> None:
    folder = write(tmp_path, {"config.json": BERT, "sentence_bert_config.json": {"max_seq_length": 64}})
    assert served(folder).max_context_len == 64


def test_a_mode_of_pooling_may_be_named(tmp_path: Path) -> None:
    own = {"pooling_mode": "cls", "embedding_dimension": 48}
    files = {"config.json": BERT, "modules.json": MODULES, "1_Pooling/config.json": own}
    encoder = served(write(tmp_path, files)).encoder
    assert encoder is not None
    assert encoder.embedding.pooling is Pooling.CLS


def test_weights_are_counted(tmp_path: Path) -> None:
    for family, scores in (("bert", False), ("roberta", True), ("distilbert", False)):
        folder = tmp_path / family
        folder.mkdir()
        model = make_tiny_encoder(folder, family, scores=scores)
        unused = sum(one.numel() for name, one in model.named_parameters() if "pooler" in name and not scores)
        config = served(folder).encoder
        assert config is not None
        assert config.num_parameters == sum(one.numel() for one in model.parameters()) - unused


def test_what_a_cross_encoder_applies(tmp_path: Path) -> None:
    config = BERT | {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    encoder = served(write(tmp_path, {"config.json": config})).encoder
    assert encoder is not None
    assert (encoder.score, encoder.vector_width) == (HeadActivation.SIGMOID, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_decoder": True},
        {"position_embedding_type": "relative_key"},
        {"hidden_act": "mish"},
        {"num_attention_heads": 5},
        {"architectures": ["BertForSequenceClassification"]},
        {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}},
        {
            "architectures": ["BertForSequenceClassification"],
            "id2label": {"0": "a"},
            "sentence_transformers": {"activation_fn": "os.system"},
        },
        {"matryoshka_dimensions": [0]},
        {"model_type": "electra"},
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        read_any_config(write(tmp_path, {"config.json": BERT | changes}))


DENSE = [*MODULES, {"type": "x.Dense", "path": "2_Dense"}]


@pytest.mark.parametrize(
    "files",
    [
        {"modules.json": [1]},
        {"modules.json": MODULES * 5},
        {"modules.json": MODULES[::-1], "1_Pooling/config.json": MEAN},
        {"modules.json": [*MODULES, {"type": "x.LSTM", "path": "2_LSTM"}], "1_Pooling/config.json": MEAN},
        {"modules.json": [MODULES[0], {"type": "x.Pooling", "path": "../other"}]},
        {"modules.json": [MODULES[0] | {"path": "0_Transformer"}, MODULES[1]], "1_Pooling/config.json": MEAN},
        {"modules.json": MODULES, "1_Pooling/config.json": {}},
        {"modules.json": MODULES, "1_Pooling/config.json": MEAN | {"pooling_mode_cls_token": True}},
        {"modules.json": MODULES, "1_Pooling/config.json": MEAN | {"include_prompt": False}},
        {"modules.json": MODULES, "1_Pooling/config.json": {"pooling_mode": "attention"}},
        {
            "modules.json": DENSE,
            "1_Pooling/config.json": MEAN,
            "2_Dense/config.json": {"in_features": 48, "out_features": 9, "activation_function": "os.system"},
        },
        {"sentence_bert_config.json": {"max_seq_length": 64, "do_lower_case": True}},
        {"config_sentence_transformers.json": {"prompts": {"a": 3}}},
        {"config_sentence_transformers.json": {"prompts": {}, "default_prompt_name": "a"}},
        {"config_sentence_transformers.json": {"prompts": {"a": "a" * 5000}}},
    ],
)
def test_files_of_sentence_transformers_that_are_refused(files: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        read_any_config(write(tmp_path, {"config.json": BERT, **files}))


def test_settings_without_effect_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": BERT})
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        resolve_model(ModelSectionConfig(path=str(tmp_path)), EngineConfig(kv_cache_dtype="int8"))
    with pytest.raises(ConfigError, match="tool_format"):
        served(tmp_path, tool_format="hermes")


def test_missing_weights_are_named(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path, "bert")
    write_tokenizer(tmp_path, has_types=True)
    write_sentence_files(tmp_path, "pooling_mode_cls_token", dense=(8, "torch.nn.modules.linear.Identity"))
    (tmp_path / "2_Dense/model.safetensors").unlink()
    encoder = served(tmp_path).encoder
    assert encoder is not None
    with pytest.raises(AlignedServeError, match="2_Dense"):
        load_encoder_weights(tmp_path, encoder, torch.float32, torch.device("cpu"))
