"""The model that tests put on a hub."""

import hashlib
import json

from tests.support.models.tiny_llama import TINY_LLAMA

REPO = "org/tiny"
WEIGHTS = b"".join(hashlib.sha256(str(number).encode()).digest() for number in range(1 << 15)) * 4  # 4 MiB


def model_files(**changes: bytes) -> dict[str, bytes]:
    """A model's files and others that serving does not need. Weights are not read here."""
    config = json.dumps(TINY_LLAMA).encode()
    return {
        "config.json": config,
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{}",
        "model.safetensors": WEIGHTS,
        "pytorch_model.bin": b"never",
        "README.md": b"# tiny",
        **changes,
    }
