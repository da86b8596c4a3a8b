"""Small random encoders of every family, written by transformers, with a tokenizer and sentence-transformers' files."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch

from tests.support.models.tiny_models import transformers_library

VOCABULARY = [
    "<s>",
    "<pad>",
    "</s>",
    "[UNK]",
    *"abcdefghijklmnopqrstuvwxyz",
    *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"),
]
_SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 130,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_DISTILBERT = {
    "vocab_size": len(VOCABULARY),
    "dim": 48,
    "n_layers": 3,
    "n_heads": 4,
    "hidden_dim": 80,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
}
# By family: model class without its end, and the arguments of its config.
TINY_ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**_SIZES, "max_position_embeddings": 128, "type_vocab_size": 2}),
    "bert_tanh": ("Bert", {**_SIZES, "max_position_embeddings": 128, "hidden_act": "gelu_new"}),
    "roberta": ("Roberta", {**_SIZES, "type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "xlm-roberta": ("XLMRoberta", {**_SIZES, "type_vocab_size": 1}),
    "camembert": ("Camembert", {**_SIZES, "type_vocab_size": 1}),
    "distilbert": ("DistilBert", _DISTILBERT),
}


def make_tiny_encoder(folder: Path, family: str, *, scores: bool = False, **changes: Any) -> Any:
    """Write an encoder named in TINY_ENCODERS into `folder`; return the same model in float64.

    `scores`: a cross-encoder. `changes`: arguments of its config in place of those there.
    """
    library = transformers_library()
    name, arguments = TINY_ENCODERS[family]
    labels = {"num_labels": 1} if scores else {}
    config = getattr(library, f"{name}Config")(**arguments | labels | changes)
    torch.manual_seed(7)
    suffix = "ForSequenceClassification" if scores else "Model"
    model: Any = getattr(library, f"{name}{suffix}")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.08)
    model.train(False)
    library.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, safe_serialization=True)
    write_tokenizer(folder, has_types=name == "Bert")
    return model.double()


def write_tokenizer(folder: Path, *, has_types: bool) -> None:
    """Write a WordPiece tokenizer of letters. `has_types`: the second text of a pair has a type of its own."""
    vocabulary = {piece: number for number, piece in enumerate(VOCABULARY)}
    model: Any = tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]")
    tokenizer: Any = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    second = 1 if has_types else 0
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>",
        pair=f"<s> $A </s> $B:{second} </s>:{second}",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_sentence_files(
    folder: Path, pooling: str, *, dense: tuple[int, str] | None = None, **settings: Any
) -> torch.Tensor | None:
    """Write sentence-transformers' files; `pooling`: the flag that is set. Return the weight of a dense layer of this
    width and activation, if one is asked for. `settings`: of config_sentence_transformers.json."""
    from safetensors.torch import save_file

    width = json.loads((folder / "config.json").read_text()).get("hidden_size", 48)
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), "Normalize"]
    modules = [
        {"idx": number, "name": str(number), "path": f"{number}_{kind}" if number else "", "type": f"some.path.{kind}"}
        for number, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": width, pooling: True}))
    if dense is None:
        return None
    (folder / "2_Dense").mkdir()
    own = {"in_features": width, "out_features": dense[0], "bias": False, "activation_function": dense[1]}
    (folder / "2_Dense/config.json").write_text(json.dumps(own))
    weight = torch.randn(dense[0], width, generator=torch.Generator().manual_seed(3))
    save_file({"linear.weight": weight}, folder / "2_Dense/model.safetensors")
    return weight.double()
