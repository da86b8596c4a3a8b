"""Ten answers of a small Llama with random weights, by our engine and by transformers on the same device."""

import importlib
import tempfile
from pathlib import Path
from typing import Any

import torch

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.engine.engine import Engine, NewSequence
from alignedserve.runtime.engine.engine_options import EngineOptions
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.weight_files import load_weights

_NUM_ANSWERS, _ANSWER_LEN, _CHUNK, _BLOCK_SIZE = 10, 24, 32, 16
_TOY_ANSWERS, _MAX_CONTEXT_LEN = 2, 256
VOCAB_SIZE = 503
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def compare_answers(device: torch.device, *, is_toy: bool = False) -> dict[str, Any]:
    """Return the answers, of transformers too, and which differ; float32, greedy, all at once, prompts in chunks."""
    try:
        model = random_llama(_MAX_CONTEXT_LEN, deviation=0.08)
    except ModuleNotFoundError:
        return {"left_out": ["transformers is not installed"]}
    count = _TOY_ANSWERS if is_toy else _NUM_ANSWERS
    prompts = [torch.randint(3, VOCAB_SIZE, (3 + 11 * index,)).tolist() for index in range(count)]
    with tempfile.TemporaryDirectory() as name:
        model.save_pretrained(name)
        ours = _by_engine(Path(name), device, prompts)
    theirs = _by_transformers(model.to(device), prompts, device)
    differing = [index for index in range(count) if ours[index] != theirs[index]]
    failures = [f"answer {index} is not that of transformers" for index in differing]
    return {"prompt_lens": [len(prompt) for prompt in prompts], "ours": ours, "theirs": theirs, "failures": failures}


def random_llama(max_context_len: int, *, deviation: float) -> Any:
    """Return a small Llama of transformers, always the same. `deviation`: of what is added, so that its logits differ.

    Raises ModuleNotFoundError without transformers.
    """
    transformers: Any = importlib.import_module("transformers")  # not above: the other parts do without it
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**_SIZES, max_position_embeddings=max_context_len)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * deviation)
    return model


def _by_engine(folder: Path, device: torch.device, prompts: list[list[int]]) -> list[list[int]]:
    config = read_config(folder)
    decoder = Decoder(config, load_weights(folder, config, torch.float32, device, None))
    counts = [blocks_for(len(prompt) + _ANSWER_LEN, _BLOCK_SIZE) for prompt in prompts]
    storage = BlockStorage(
        config.block_layout(_BLOCK_SIZE, "float32"), sum(counts), device, has_scratch=device.type != "cpu"
    )
    engine = Engine(
        model=decoder,
        storage=storage,
        options=EngineOptions(max_sequences=len(prompts), max_context_len=_MAX_CONTEXT_LEN),
    )
    engine.record_graphs()
    sampling = SamplingParams(temperature=0.0, max_tokens=_ANSWER_LEN, ignore_eos=True)
    names = [RequestId(str(index)) for index in range(len(prompts))]
    first = 0
    for name, prompt, count in zip(names, prompts, counts, strict=True):
        blocks = tuple(BlockId(block) for block in range(first, first + count))
        engine.add_sequence(NewSequence(name, tuple(prompt), len(prompt), 0, blocks, sampling))
        first += count
    whole = [len(prompt) + _ANSWER_LEN for prompt in prompts]
    while True:
        waiting = [name for name, length in zip(names, whole, strict=True) if engine.num_tokens(name) < length]
        if not waiting:
            break
        left = {name: engine.num_tokens(name) - engine.num_computed(name) for name in waiting}
        engine.execute([(name, min(_CHUNK, left[name])) for name in waiting])
    return [list(engine.token_ids(name))[len(prompt) :] for name, prompt in zip(names, prompts, strict=True)]


@torch.inference_mode()
def _by_transformers(model: Any, prompts: list[list[int]], device: torch.device) -> list[list[int]]:
    answers = []
    for prompt in prompts:
        tokens = torch.tensor([prompt], device=device)
        options = {"max_new_tokens": _ANSWER_LEN, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        generated = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        answers.append(generated[0, len(prompt) :].tolist())
    return answers
