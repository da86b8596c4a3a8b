"""Small random GGUF files, written by the `gguf` package as llama.cpp's converter writes them, for tests."""

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, CONTEXT = 256, 2, 8, 4, 512, 512
HEAD_DIM = HIDDEN // HEADS
NUM_CONTROL = 3
# Their scales are float16 numbers at these bytes of a block; other bytes may be anything.
_SCALE_PLACES = {
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q3_K": (108,),
    "Q2_K": (80, 82),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS", "IQ3_S", "IQ2_XS"), (0,)),
}


def write_tiny_gguf(
    path: Path,
    architecture: str = "llama",
    types: tuple[str, ...] = ("F32",),
    *,
    seed: int = 0,
    has_head: bool = False,
    metadata: dict[str, Any] | None = None,
    rope_factors: npt.NDArray[Any] | None = None,
    num_extra_tokens: int = 0,
    pre: str = "smollm",
) -> Path:
    """Write a model of two layers, whose matrices take the types in turn, and a byte-level tokenizer.

    `metadata` replaces entries, named without the architecture; None leaves one out.
    """
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, architecture, metadata or {})
    _add_tokenizer(writer, pre, num_extra_tokens)
    vocab_size = len(byte_level_tokens())
    matrices = 0

    def matrix(name: str, rows: int, columns: int) -> None:
        nonlocal matrices
        add_matrix(writer, name, random_rows(rng, rows, columns, types[matrices % len(types)]))
        matrices += 1

    def vector(name: str, width: int, mean: float) -> None:
        writer.add_tensor(name, (mean + 0.1 * rng.standard_normal(width)).astype(np.float32))

    matrix("token_embd.weight", vocab_size, HIDDEN)
    for layer in range((metadata or {}).get("block_count", LAYERS) if architecture == "gemma3" else LAYERS):
        prefix = f"blk.{layer}."
        matrix(prefix + "attn_q.weight", HEADS * HEAD_DIM, HIDDEN)
        matrix(prefix + "attn_k.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(prefix + "attn_v.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(prefix + "attn_output.weight", HIDDEN, HEADS * HEAD_DIM)
        matrix(prefix + "ffn_gate.weight", FFN, HIDDEN)
        matrix(prefix + "ffn_up.weight", FFN, HIDDEN)
        matrix(prefix + "ffn_down.weight", HIDDEN, FFN)
        for name in ("attn_norm", "ffn_norm"):
            vector(f"{prefix}{name}.weight", HIDDEN, 1.0)
        if architecture == "gemma3":
            for name in ("post_attention_norm", "post_ffw_norm"):
                vector(f"{prefix}{name}.weight", HIDDEN, 1.0)
        if architecture in ("qwen3", "gemma3"):
            for name in ("attn_q_norm", "attn_k_norm"):
                vector(f"{prefix}{name}.weight", HEAD_DIM, 1.0)
        if architecture == "qwen2":
            for name, width in (("attn_q", HEADS * HEAD_DIM), ("attn_k", KV_HEADS * HEAD_DIM)):
                vector(f"{prefix}{name}.bias", width, 0.0)
            vector(f"{prefix}attn_v.bias", KV_HEADS * HEAD_DIM, 0.0)
    vector("output_norm.weight", HIDDEN, 1.0)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    if has_head:
        matrix("output.weight", vocab_size, HIDDEN)
    _write(writer)
    return path


def random_rows(
    rng: np.random.Generator, rows: int, columns: int, type_name: str
) -> tuple[npt.NDArray[Any], gguf.GGMLQuantizationType]:
    """Return random rows as the file has them, of values about as large as a trained layer's."""
    tensor_type = gguf.GGMLQuantizationType[type_name]
    if type_name not in _SCALE_PLACES:
        values = (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)
        return gguf.quants.quantize(values, tensor_type), tensor_type
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
    blocks = rng.integers(0, 256, (rows * columns // block_values, block_bytes), dtype=np.uint8)
    for place in _SCALE_PLACES[type_name]:
        scales = rng.uniform(0.3, 1.0, (len(blocks), 1)) * 2e-4 * (0.2 if type_name == "Q6_K" else 1.0)
        blocks[:, place : place + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1), tensor_type


def add_matrix(writer: Any, name: str, rows: tuple[npt.NDArray[Any], gguf.GGMLQuantizationType]) -> None:
    """Add one tensor in its type."""
    writer.add_tensor(name, rows[0], raw_dtype=rows[1])


def byte_level_tokens() -> list[str]:
    """Return three control tokens, one for each byte, and two merged ones."""
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [chr(256 + place) for place in range(256 - len(printable))]
    return [*control, *map(chr, printable), *others, "he", "hel"]


def mutated_header(header: bytes, rng: random.Random) -> bytes:
    """Change some bytes, put an extreme number somewhere, or move a piece of the header."""
    content = bytearray(header)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(len(content))
        kind = rng.random()
        if kind < 0.5:
            content[place] = rng.randrange(256)
        elif kind < 0.8:
            number = rng.choice((0, 1, 255, 2**16, 2**31, 2**32 - 1, 2**63, 2**64 - 1, rng.randrange(2**20)))
            content[place : place + 8] = struct.pack("<Q", number)[: len(content) - place]
        else:
            source = rng.randrange(len(content))
            piece = content[source : source + rng.randrange(1, 64)]
            content[place : place + len(piece)] = piece[: len(content) - place]
    return bytes(content)


def _write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_metadata(writer: Any, architecture: str, changed: dict[str, Any]) -> None:
    entries: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    if architecture in ("qwen3", "gemma3"):
        entries |= {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM}
    for name, value in (entries | changed).items():
        key = name if name.startswith(("general.", "tokenizer.")) else f"{architecture}.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)


def _add_tokenizer(writer: Any, pre: str, num_extra_tokens: int) -> None:
    tokens = [*byte_level_tokens(), *(f"extra{number}" for number in range(num_extra_tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * NUM_CONTROL + [1] * (len(tokens) - NUM_CONTROL))
    writer.add_token_merges(["h e", "he l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
