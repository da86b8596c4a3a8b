"""Models of OPT's family with random weights, for load and for equal answers: nothing is downloaded."""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "ffn_dim": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "word_embed_proj_dim": 128,
}


def make_model(folder: Path, **shape: int) -> Path:
    """Write a model; without a `shape`: that of facebook/opt-125m."""
    torch.manual_seed(0)
    config = OPTConfig(**shape)
    OPTForCausalLM(config).to(torch.float32).save_pretrained(folder)
    words = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3} | {
        f"w{token}": token for token in range(4, config.vocab_size)
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
