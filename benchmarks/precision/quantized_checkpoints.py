"""Quantised checkpoints of SmolLM2: greedy agreement with their values in float32, bytes and speed of one stream.

    python -m benchmarks.precision.quantized_checkpoints [FILE.gguf, otherwise SmolLM2 where it is installed]

The file is unpacked to a folder of float32 weights, which the tests' quantisers round to the nearest number. After the
same tokens (greedy answers of the float32 weights), for each format: the share of next tokens that products as they
are served in bfloat16 choose like the checkpoint's own values in float32 do, and the share chosen like by the weights
before they were quantised, which says what such rounding loses, calibrated methods less. Speeds are medians of
alternating runs.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from alignedserve.gguf.file import GgufFile
from alignedserve.runtime.engine.decoder import Decoder
from alignedserve.runtime.model.built_in import smollm2_file
from alignedserve.runtime.model.gguf.config import gguf_config
from alignedserve.runtime.model.gguf.source import GgufSource
from alignedserve.runtime.model.model_config import ModelConfig
from alignedserve.runtime.model.model_files import read_config, weights_in_files
from alignedserve.runtime.model.quantized.product_form import Computing
from alignedserve.runtime.model.quantized.source import QuantizedSource
from alignedserve.runtime.model.safetensors_source import SafetensorsSource
from alignedserve.runtime.model.weight_files import load_weights
from alignedserve.runtime.model.weight_loader import assemble_weights
from alignedserve.runtime.model.weight_names import PARAMETER_NAMES
from alignedserve.text.tokenizer import Tokenizer
from benchmarks.precision.gguf_agreement import prompts_of
from benchmarks.precision.quantization import logits_of
from benchmarks.support.greedy import greedy_answers
from benchmarks.support.recording import write_result
from tests.support.quantized_checkpoints import (
    FORMATS,
    CheckpointFormat,
    awq_columns,
    gptq_columns,
    packed_rows,
    quantize_folder,
)

NUM_PROMPTS = 12
MAX_TOKENS = 32
SPEED_TOKENS = 48
ROUNDS = 5
GROUP = 64  # divides all widths of SmolLM2
_GPTQ = FORMATS["gptq"].config | {"group_size": GROUP}
_W4A16: dict[str, Any] = json.loads(json.dumps(FORMATS["w4a16 in groups"].config))
_W4A16["config_groups"]["group_0"]["weights"]["group_size"] = GROUP
CHECKPOINTS = {
    "compressed-tensors W8A8": FORMATS["w8a8"],
    "compressed-tensors W8A16": FORMATS["w8a16"],
    "compressed-tensors W4A16": CheckpointFormat(
        _W4A16, lambda weight: packed_rows(weight, 4, GROUP, scale_dtype=torch.bfloat16)
    ),
    "compressed-tensors FP8": FORMATS["fp8"],
    "AWQ": CheckpointFormat(FORMATS["awq"].config | {"group_size": GROUP}, lambda weight: awq_columns(weight, GROUP)),
    "GPTQ": CheckpointFormat(_GPTQ, lambda weight: gptq_columns(weight, 4, GROUP)),
    "GPTQ with zero points and desc_act": CheckpointFormat(
        _GPTQ | {"desc_act": True, "sym": False},
        lambda weight: gptq_columns(weight, 4, GROUP, is_symmetric=False, seed=weight.shape[1]),
    ),
}


def write_plain(path: Path, folder: Path) -> ModelConfig:
    """Write a llama of a GGUF file as a Hugging Face folder of float32 weights."""
    file = GgufFile(path)
    config = gguf_config(file)
    source = GgufSource(file, config, torch.float32, torch.device("cpu"), unpacks_all=True)
    ours, theirs = PARAMETER_NAMES[config.family], source.names
    renamed = {f"model.{ours.embedding}": theirs.embedding, f"model.{ours.final_norm}": theirs.final_norm}
    for layer in range(config.num_layers):
        before, after = theirs.layer.format(layer=layer), f"model.{ours.layer.format(layer=layer)}"
        modules = {name: getattr(theirs, name) for name in ("attention_norm", "mlp_norm", "output", "down")}
        renamed |= {after + getattr(ours, name): before + module for name, module in modules.items()}
        pairs = (*zip(ours.qkv, theirs.qkv, strict=True), *zip(ours.gate_up, theirs.gate_up, strict=True))
        renamed |= {after + new: before + old for new, old in pairs}
    tensors = {
        f"{new}.weight": source.tensor(f"{old}.weight", file.tensors[f"{old}.weight"].shape).contiguous()
        for new, old in renamed.items()
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    assert config.rope is not None, "a llama rotates"
    sizes = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.ties_embeddings,
        "eos_token_id": list(config.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(sizes))
    return read_config(folder)


def load(folder: Path, dtype: torch.dtype, *, unpacks_all: bool = False) -> Decoder:
    """Load a folder, with products of packed weights or without."""
    config = read_config(folder)
    if config.stored_quantization is None or not unpacks_all:
        return Decoder(config, load_weights(folder, config, dtype))
    plain = SafetensorsSource(folder, dtype, torch.device("cpu"))
    names = PARAMETER_NAMES[config.family]
    source = QuantizedSource(plain, config.stored_quantization, names, unpacks_all=True)
    return Decoder(config, assemble_weights(config, source, packed=source))


def choices(decoder: Decoder, prompts: list[list[int]], answers: list[list[int]]) -> Tensor:
    """Return the likeliest token at every place of the answers."""
    logits = [logits_of(decoder, [*p, *a[:-1]])[len(p) - 1 :] for p, a in zip(prompts, answers, strict=True)]
    return torch.cat(logits).argmax(-1)


def measure_speeds(decoders: dict[str, Decoder], prompt: list[int]) -> dict[str, float]:
    """Return the output tokens per second of one stream."""
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(ROUNDS):
        for name, decoder in decoders.items():
            greedy_answers(decoder, [prompt], 4, set())
            started = time.perf_counter()
            greedy_answers(decoder, [prompt], SPEED_TOKENS, set())
            seconds[name].append(time.perf_counter() - started)
    return {name: round(SPEED_TOKENS / statistics.median(taken), 1) for name, taken in seconds.items()}


@torch.inference_mode()
def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    path: Path = parser.parse_args().file or smollm2_file()
    tokenizer = Tokenizer.load(path)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        plain = Path(temporary) / "plain"
        config = write_plain(path, plain)
        prompts, ends = prompts_of(tokenizer)[:: 40 // NUM_PROMPTS][:NUM_PROMPTS], set(config.eos_token_ids)
        answers = greedy_answers(load(plain, torch.float32), prompts, MAX_TOKENS, ends)
        expected = torch.tensor([token for answer in answers for token in answer])
        decoders = {"bfloat16": load(plain, torch.bfloat16)}
        own = choices(decoders["bfloat16"], prompts, answers)
        figures["bfloat16"] = {
            "weight_mib": round(config.loaded_weight_bytes("bfloat16") / 2**20, 1),
            "like_unquantised": round(float((own == expected).float().mean()), 4),
        }
        for name, checkpoint in CHECKPOINTS.items():
            folder = Path(temporary) / "quantised"
            shutil.copytree(plain, folder)
            quantize_folder(folder, checkpoint)
            decoders[name] = load(folder, torch.bfloat16)
            own = choices(decoders[name], prompts, answers)
            values = choices(load(folder, torch.float32, unpacks_all=True), prompts, answers)
            stored = weights_in_files(folder, read_config(folder), Computing("cpu", "bfloat16"))
            assert stored is not None, "the folder is quantised"
            figures[name] = {
                "weights": stored.description,
                "weight_mib": round(stored.num_bytes / 2**20, 1),
                "like_its_values": round(float((own == values).float().mean()), 4),
                "like_unquantised": round(float((own == expected).float().mean()), 4),
            }
            print(name, figures[name], flush=True)
            shutil.rmtree(folder)
    record = {"tokens": len(expected), "threads": torch.get_num_threads(), "checkpoints": figures}
    write_result("quantized_checkpoints", record)  # what is known, should the rest be cut off
    for name, speed in measure_speeds(decoders, prompts[0]).items():
        figures[name]["tokens_per_s"] = speed
        print(name, speed, flush=True)
    write_result("quantized_checkpoints", record)


if __name__ == "__main__":
    main()
