"""Layers with a state against transformers, in turns: python -m benchmarks.engine.states [--dtype bfloat16].

Random weights of three kinds of layers, eight of width 1024. Of every figure the best of many turns counts, by seconds
of the process with one thread, so that others on the machine count little. Prints a row of a table for each.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.engine.engine import Engine, NewSequence, StepSlice
from alignedserve.runtime.engine.engine_options import EngineOptions
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.hf_config import read_model_config
from alignedserve.runtime.model.weight_files import load_weights
from benchmarks.measuring.recording import write_result

PROMPT_LEN, NUM_STREAMS, NUM_STEPS, NUM_ROUNDS = 256, 16, 4, 8
BLOCK_SIZE = 512  # of a whole request, as blocks with states are large
_COMMON: dict[str, Any] = {
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "short convolutions": (
        "Lfm2Config",
        {"intermediate_size": 4608, "num_attention_heads": 16, "num_key_value_heads": 8, "full_attn_idxs": [2, 5]}
        | {"block_auto_adjust_ff_dim": False},
    ),
    "Mamba-2": (
        "GraniteMoeHybridConfig",
        {"layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 2, "num_local_experts": 0, "mamba_n_heads": 32}
        | {"shared_intermediate_size": 2048, "mamba_d_head": 64, "mamba_d_state": 128, "num_attention_heads": 16},
    ),
    "gated delta rule": (
        "Qwen3_5TextConfig",
        {"intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
        | {"linear_num_key_heads": 8, "linear_num_value_heads": 16},
    ),
}
_SAMPLING = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)


class Rates(NamedTuple):
    """Tokens per second of the process."""

    prompt: float
    one_stream: float
    streams: float


class Contender:
    """One side: what it computes, a turn at a time."""

    def prompt(self, stream: int) -> None:
        """Compute the prompt of a stream."""
        raise NotImplementedError

    def decode(self, count: int) -> None:
        """Compute NUM_STEPS tokens of each of the first streams."""
        raise NotImplementedError


class Own(Contender):
    """The engine."""

    def __init__(self, folder: Path, dtype: str) -> None:
        config = read_model_config(folder)
        self._engine = Engine(
            model=Decoder(config, load_weights(None, config, torch_dtype(dtype))),
            storage=BlockStorage(config.block_layout(BLOCK_SIZE, dtype), NUM_STREAMS),
            options=EngineOptions(max_sequences=NUM_STREAMS, max_context_len=BLOCK_SIZE),
        )

    @override
    def prompt(self, stream: int) -> None:
        tokens = tuple(3 + (7 * stream + place) % 8000 for place in range(PROMPT_LEN))
        request_id = RequestId(str(stream))
        self._engine.add_sequence(NewSequence(request_id, tokens, PROMPT_LEN, 0, (BlockId(stream),), _SAMPLING))
        self._engine.execute([StepSlice(request_id, PROMPT_LEN)])

    @override
    def decode(self, count: int) -> None:
        slices = [StepSlice(RequestId(str(stream)), 1) for stream in range(count)]
        for _ in range(NUM_STEPS):
            self._engine.execute(slices)


class Reference(Contender):
    """The same by transformers, whose streams are one batch."""

    def __init__(self, config: Any, dtype: str) -> None:
        auto = import_module("transformers").AutoModelForCausalLM
        self._model = auto.from_config(config, dtype=torch_dtype(dtype)).eval()
        self._caches: dict[int, Any] = {}

    @override
    def prompt(self, stream: int) -> None:
        self._prompts(1)

    @override
    def decode(self, count: int) -> None:
        with torch.inference_mode():
            if count not in self._caches:
                self._caches[count] = self._prompts(count)
            tokens = torch.randint(3, 8000, (count, 1))
            for _ in range(NUM_STEPS):
                self._model(tokens, past_key_values=self._caches[count])

    def _prompts(self, count: int) -> Any:
        with torch.inference_mode():
            tokens = torch.randint(3, 8000, (count, PROMPT_LEN))
            return self._model(tokens, use_cache=True, logits_to_keep=1).past_key_values


def best_rates(contenders: Sequence[Contender], clock: Callable[[], float]) -> list[Rates]:
    """Measure all of them, in turns."""

    def best(num_tokens: int, turns: Iterable[Callable[[Contender], None]]) -> list[float]:
        least = [float("inf")] * len(contenders)
        for turn in turns:
            for index, contender in enumerate(contenders):
                began = clock()
                turn(contender)
                least[index] = min(least[index], clock() - began)
        return [num_tokens / seconds for seconds in least]

    def prompted(stream: int) -> Callable[[Contender], None]:
        return lambda contender: contender.prompt(stream)

    def decoded(count: int) -> list[Callable[[Contender], None]]:
        return [lambda contender: contender.decode(count)] * NUM_ROUNDS

    prompts = best(PROMPT_LEN, [prompted(stream) for stream in range(NUM_STREAMS)])
    one, streams = best(NUM_STEPS, decoded(1)), best(NUM_STEPS * NUM_STREAMS, decoded(NUM_STREAMS))
    return [Rates(*each) for each in zip(prompts, one, streams, strict=True)]


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", default=1, type=int, help="with more than one the wall's seconds count")
    parser.add_argument("--record", action="store_true", help="write the result")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    figures: dict[str, Any] = {"threads": arguments.threads, "dtype": arguments.dtype, "kinds": {}}
    for name, (class_name, options) in MODELS.items():
        config = getattr(import_module("transformers"), class_name)(**_COMMON | options)
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            contenders = (Own(Path(folder), arguments.dtype), Reference(config, arguments.dtype))
        own, theirs = best_rates(contenders, time.process_time if arguments.threads == 1 else time.perf_counter)
        print(f"| {name} | {arguments.dtype} | {' | '.join(_pairs(own, theirs))} |", flush=True)
        times = {each: getattr(own, each) / getattr(theirs, each) for each in Rates._fields}
        figures["kinds"][name] = {"alignedserve": own._asdict(), "transformers": theirs._asdict(), "times": times}
    if arguments.record:
        write_result(f"engine/states_{arguments.dtype}_{arguments.threads}", figures)
    else:
        print(json.dumps(figures))


def _pairs(own: Rates, theirs: Rates) -> Iterator[str]:
    for ours, other in zip(own, theirs, strict=True):
        yield f"{ours:.0f}; {other:.0f}: {ours / other:.1f}"


if __name__ == "__main__":
    main()
