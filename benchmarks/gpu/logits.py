"""Comparison of the engine on a GPU with transformers: log-probabilities, in every dtype.

A small Llama with random weights, rounded to the dtype. Both are compared with the same model in float64: prompts in
chunks, then decode steps, whose chosen tokens are scored again. The engine may be twice as far off as transformers is.
"""

import importlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.attention.backend import AUTO, TORCH, TRITON
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.engine.engine import Engine, NewSequence
from alignedserve.runtime.engine.engine_options import EngineOptions
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.hf_config import read_model_config
from alignedserve.runtime.model.weight_files import load_weights
from kernels.gpu_dispatch import gpu_kernels_available
from lab.gpu_check.answers import VOCAB_SIZE, random_llama

DTYPES = ("float32", "bfloat16", "float16")
PROMPTS, TOY_PROMPTS = (300, 65, 17, 2), (37, 5)
CHUNK, BLOCK_SIZE = 64, 16
NUM_DECODED, TOY_NUM_DECODED = 20, 3
# How much further off than transformers: sums are in another order, and some are rounded where its are not.
ALLOWED, ROUNDING = 2.0, {"float32": 1e-6, "bfloat16": 1e-3, "float16": 1e-4}
_MAX_CONTEXT_LEN = 512


def compare_logits(device: torch.device, *, is_toy: bool) -> dict[str, Any]:
    model = random_llama(_MAX_CONTEXT_LEN, deviation=0.05)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for dtype, attention in _cases(device):
            rows.append(_compare(Path(folder), device, dtype, attention, is_toy))
            print(rows[-1], flush=True)
    return {"rows": rows, "failures": [f"{row['dtype']}, {row['attention']}" for row in rows if not row["is_right"]]}


def _cases(device: torch.device) -> Iterator[tuple[str, str]]:
    for dtype in DTYPES:
        if device.type == "cuda":
            yield from ((dtype, TRITON), (dtype, TORCH))
        else:
            yield dtype, AUTO
    if device.type == "cpu" and gpu_kernels_available(device):
        yield "float32", TRITON  # its interpreter cuts bfloat16 off where a GPU rounds


@torch.inference_mode()
def _compare(folder: Path, device: torch.device, dtype: str, attention: str, is_toy: bool) -> dict[str, Any]:
    transformers: Any = importlib.import_module("transformers")
    rounded: Any = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch_dtype(dtype)).eval()
    config = read_model_config(folder)
    decoder = Decoder(config, load_weights(folder, config, torch_dtype(dtype), device, None))
    ours, sequences = _by_engine(decoder, attention, is_toy)
    theirs = _by_transformers(rounded.to(device), sequences, device)
    exact = _by_transformers(rounded.to("cpu").double(), sequences, torch.device("cpu"))
    # The first token of a sequence has no log-probability.
    error, their_error = (_root_mean_square(found, exact) for found in (ours, theirs))
    limit = ALLOWED * their_error + ROUNDING[dtype]
    return {
        "dtype": dtype,
        "attention": attention,
        "error": error,
        "transformers_error": their_error,
        "limit": limit,
        "is_right": error <= limit,  # False for what is not a number
    }


def _by_engine(decoder: Decoder, attention: str, is_toy: bool) -> tuple[list[Tensor], list[list[int]]]:
    lengths, num_decoded = (TOY_PROMPTS, TOY_NUM_DECODED) if is_toy else (PROMPTS, NUM_DECODED)
    whole = {RequestId(str(length)): length + num_decoded for length in lengths}
    engine = _engine(decoder, attention, whole, num_decoded)
    found: dict[RequestId, list[float]] = {request_id: [] for request_id in whole}
    num_computed = dict.fromkeys(whole, 0)
    while True:
        known = {one: len(engine.token_ids(one)) for one in whole}
        scheduled = [(one, min(CHUNK, known[one] - num_computed[one])) for one in whole if known[one] < whole[one]]
        if not scheduled:
            break
        output = engine.execute(scheduled)
        num_computed |= {one: num_computed[one] + count for one, count in scheduled}
        assert not output.failed, "logits that are not numbers"
        for part in output.prompt_logprobs:
            found[part.request_id] += [entry.logprob for entry in part.entries]
        for token in output.sampled:
            assert token.logprob is not None, "a log-probability was asked for"
            found[token.request_id].append(token.logprob.logprob)
    tensors = [torch.tensor(logprobs, dtype=torch.float64) for logprobs in found.values()]
    return tensors, [list(engine.token_ids(request_id)) for request_id in whole]


def _engine(decoder: Decoder, attention: str, whole: dict[RequestId, int], num_decoded: int) -> Engine:
    num_blocks = sum(blocks_for(length, BLOCK_SIZE) for length in whole.values())
    layout = decoder.config.block_layout(BLOCK_SIZE, decoder.dtype_name)
    storage = BlockStorage(layout, num_blocks, decoder.device, has_scratch=True)
    storage.blocks.fill_(float("nan"))
    engine = Engine(
        model=decoder,
        storage=storage,
        options=EngineOptions(max_sequences=len(whole), max_context_len=max(whole.values()), attention=attention),
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=num_decoded, ignore_eos=True, num_logprobs=0, num_prompt_logprobs=0
    )
    generator = torch.Generator().manual_seed(1)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    for request_id, length in whole.items():
        prompt = tuple(torch.randint(3, VOCAB_SIZE, (length - num_decoded,), generator=generator).tolist())
        blocks = tuple(BlockId(free.pop()) for _ in range(blocks_for(length, BLOCK_SIZE)))
        engine.add_sequence(NewSequence(request_id, prompt, len(prompt), 0, blocks, sampling))
    return engine


def _by_transformers(model: Any, sequences: list[list[int]], device: torch.device) -> list[Tensor]:
    found = []
    for sequence in sequences:
        tokens = torch.tensor(sequence, device=device)
        logprobs = model(tokens[None]).logits[0, :-1].double().log_softmax(-1)
        found.append(logprobs.gather(1, tokens[1:, None]).squeeze(1).cpu())
    return found


def _root_mean_square(found: list[Tensor], exact: list[Tensor]) -> float:
    return float((torch.cat(found) - torch.cat(exact)).square().mean().sqrt())
