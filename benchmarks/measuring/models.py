"""Folders of models to be served with random weights."""

import json
import shutil
from pathlib import Path
from typing import Any

from alignedserve.runtime.model.named_models import pocket_folder
from lab.profiling.shapes import OPT_125M

_CONFIG: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": OPT_125M.vocab_size,
    "hidden_size": OPT_125M.hidden_size,
    "word_embed_proj_dim": OPT_125M.embedding_size,
    "ffn_dim": OPT_125M.intermediate_size,
    "num_hidden_layers": OPT_125M.num_layers,
    "num_attention_heads": OPT_125M.num_heads,
    "max_position_embeddings": OPT_125M.max_position_embeddings,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "tie_word_embeddings": True,
}


def make_opt_125m(folder: Path) -> Path:
    """Write the shape of OPT 125M, with the shipped model's tokenizer, into a new folder and return it.

    Made-up words stand for the rest of the vocabulary: random weights choose any token, and a token without text would
    not be seen by a client.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    shutil.copy(pocket_folder() / "tokenizer_config.json", folder)
    tokenizer = json.loads((pocket_folder() / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    known = {*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocab |= {f"word{number}": number for number in range(OPT_125M.vocab_size) if number not in known}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder
