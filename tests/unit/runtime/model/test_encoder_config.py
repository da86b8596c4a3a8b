"""What a folder of an encoder says, and what is refused of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.config.sections import EngineConfig, ModelSectionConfig
from alignedserve.core.errors import AlignedServeError, ConfigError, ModelError
from alignedserve.runtime.model.encoder.encoder_config import HeadActivation, Pooling
from alignedserve.runtime.model.encoder.encoder_weights import load_encoder_weights
from alignedserve.runtime.model.model_files import read_any_config
from alignedserve.runtime.model.served_model import ServedModel, resolve_model
from tests.support.models.tiny_encoders import make_tiny_encoder, write_sentence_files, write_tokenizer

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
