"""Model folders of well-known shapes with random weights in bfloat16: what `serve FOLDER` reads, without a download.

The tokenizer has the 256 bytes and as many words as the vocabulary has room for, so that every token is a text.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_SHARD_BYTES = 4 << 30
_POOL_VALUES = 1 << 26  # of random numbers, read over and over from other places
_PIECE_VALUES = 1 << 22
_DTYPE_BYTES = 2
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class FolderShape(NamedTuple):
    """The sizes of a decoder as its config.json has them."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    ties_embeddings: bool
    rope_theta: float = 1e6
    rope_scaling: dict[str, Any] | None = None

    @property
    def config(self) -> dict[str, Any]:
        """Return what stands in config.json."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.ties_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "bos_token_id": 256,
            "eos_token_id": 257,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield every tensor's name and shape, in the order of the files."""
        hidden, queries, keys = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            yield f"{prefix}input_layernorm.weight", (hidden,)
            for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
                yield f"{prefix}self_attn.{name}.weight", (rows, hidden)
                if self.model_type == "qwen2":
                    yield f"{prefix}self_attn.{name}.bias", (rows,)
            if self.model_type == "qwen3":
                yield f"{prefix}self_attn.q_norm.weight", (self.head_dim,)
                yield f"{prefix}self_attn.k_norm.weight", (self.head_dim,)
            yield f"{prefix}self_attn.o_proj.weight", (hidden, queries)
            yield f"{prefix}post_attention_layernorm.weight", (hidden,)
            yield f"{prefix}mlp.gate_proj.weight", (self.intermediate_size, hidden)
            yield f"{prefix}mlp.up_proj.weight", (self.intermediate_size, hidden)
            yield f"{prefix}mlp.down_proj.weight", (hidden, self.intermediate_size)
        yield "model.norm.weight", (hidden,)
        if not self.ties_embeddings:
            yield "lm_head.weight", (self.vocab_size, hidden)


_LLAMA, _QWEN2, _QWEN3 = (
    ("LlamaForCausalLM", "llama"),
    ("Qwen2ForCausalLM", "qwen2"),
    ("Qwen3ForCausalLM", "qwen3"),
)
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FOLDER_SHAPES = {
    "llama-135m": FolderShape(*_LLAMA, 49152, 576, 1536, 30, 9, 3, 64, 8192, ties_embeddings=True, rope_theta=1e5),
    "qwen2-0.5b": FolderShape(*_QWEN2, 151936, 896, 4864, 24, 14, 2, 64, 32768, ties_embeddings=True),
    "qwen3-1.7b": FolderShape(*_QWEN3, 151936, 2048, 6144, 28, 16, 8, 128, 40960, ties_embeddings=True),
    "llama-8b": FolderShape(
        *_LLAMA, 128256, 4096, 14336, 32, 32, 8, 128, 131072, ties_embeddings=False, rope_scaling=_LLAMA3_ROPE
    ),
}


def make_model_folder(folder: Path, shape: FolderShape) -> Path:
    """Write the folder, unless it is there already, and return it. Needs twice as many bytes as parameters."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(shape.vocab_size)))
    special = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    _write_weights(folder, shape)
    (folder / "config.json").write_text(json.dumps(shape.config, indent=2))  # last: the folder is complete
    return folder


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """Describe a byte-level tokenizer without merges, with two special tokens and words that only decoding uses."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    vocabulary = {characters[byte]: byte for byte in range(256)} | {"<s>": 256, "</s>": 257}
    vocabulary |= {f"Ġw{index}": index for index in range(258, vocab_size)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [{"id": 256, "content": "<s>", **flags}, {"id": 257, "content": "</s>", **flags}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def _write_weights(folder: Path, shape: FolderShape) -> None:
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, sizes in shape.tensors():
        num_bytes = math.prod(sizes) * _DTYPE_BYTES
        if filled + num_bytes > _SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append((name, sizes))
        filled += num_bytes
    pool = torch.empty(_POOL_VALUES, dtype=torch.bfloat16).normal_(generator=torch.Generator().manual_seed(0))
    if len(shards) == 1:
        _write_shard(folder / "model.safetensors", shards[0], pool)
        return
    names = [f"model-{index + 1:05}-of-{len(shards):05}.safetensors" for index in range(len(shards))]
    for file, shard in zip(names, shards, strict=True):
        _write_shard(folder / file, shard, pool)
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name, _ in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _write_shard(path: Path, tensors: list[tuple[str, tuple[int, ...]]], pool: Tensor) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, sizes in tensors:
        begin, end = end, end + math.prod(sizes) * _DTYPE_BYTES
        header[name] = {"dtype": "BF16", "shape": list(sizes), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, sizes in tensors:
            for values in _values(name, sizes, pool):
                file.write(values.view(torch.uint8).numpy().data)


def _values(name: str, sizes: tuple[int, ...], pool: Tensor) -> Iterator[Tensor]:
    """Yield a tensor in pieces: ones for norms, zeros for biases, else numbers that keep the size of their inputs."""
    count = math.prod(sizes)
    if len(sizes) == 1:
        yield torch.full((count,), 0.0 if name.endswith(".bias") else 1.0, dtype=torch.bfloat16)
        return
    begin = count % 12_345  # so that tensors differ
    while count:
        piece = pool[begin : begin + min(count, _PIECE_VALUES)]
        yield piece / math.sqrt(sizes[1])
        count -= len(piece)
        begin = (begin + len(piece) + 1) % (len(pool) - _PIECE_VALUES)
