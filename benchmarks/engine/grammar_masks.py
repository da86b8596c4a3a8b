"""The price of grammars: throughput of 64 requests with 64 schemas beside that of the same requests without, the time
of a first token, and the time of a mask by vocabulary and kind of schema.

Models have the shape of a real one and random weights; vocabularies are trained on the sources of Python's library.

    GOMP_SPINCOUNT=1000 python -m benchmarks.engine.grammar_masks         # OPT of 125M, 50 000 tokens: at most 3 %
    GOMP_SPINCOUNT=1000 python -m benchmarks.engine.grammar_masks --wide  # Qwen2 of 0.5B, 150 000 tokens: 5 %
"""

import argparse
import itertools
import os
import random
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.device.cores import num_cores
from alignedserve.runtime.device.dtypes import has_native_bfloat16, torch_dtype
from alignedserve.runtime.engine.decoder import Decoder
from alignedserve.runtime.engine.engine import Engine, NewSequence
from alignedserve.runtime.grammar.compiler import GrammarCompiler
from alignedserve.runtime.grammar.limits import PARSER_LIMITS
from alignedserve.runtime.grammar.token_masks import TokenMasks
from alignedserve.runtime.grammar.vocabulary import grammar_vocabulary
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.hf_config import parse_model_config
from alignedserve.runtime.model.random_weights import random_weights
from alignedserve.text.tokenizer import Tokenizer
from benchmarks.support.recording import write_result

NUM_REQUESTS = 64
BLOCK_SIZE, MAX_CONTEXT_LEN = 16, 96
PROMPT_LEN, NUM_ROUNDS = 32, 4
NUM_FIRST_TOKENS = 15
EOS = 0
OPT_125M: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 50272,
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "eos_token_id": EOS,
}
QWEN2_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
}


def trained_tokenizer(vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE on the sources of Python's library."""
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = (path.read_text(errors="replace") for path in files if "site-packages" not in path.parts)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 8,  # a model's logits are more than its tokens
        special_tokens=["<end>"],
        min_frequency=1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Tokenizer(tokenizer.to_str(), {}, None)


def schema_of(number: int, num_fields: int = 8) -> dict[str, Any]:
    """Return a schema whose answers have some hundred tokens: strings, numbers, choices, objects in arrays."""
    kinds: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "array", "items": {"type": "integer"}, "minItems": 8, "maxItems": 16},
        {"enum": [f"choice {number} {other}" for other in range(6)]},
        {
            "type": "array",
            "minItems": 2,
            "items": {
                "type": "object",
                "properties": {"label": {"type": "string"}, "is_set": {"type": "boolean"}},
                "required": ["label", "is_set"],
                "additionalProperties": False,
            },
        },
    ]
    properties = {f"field_{number}_{at}": kinds[(number + at) % len(kinds)] for at in range(num_fields)}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def grammar_of(schema: dict[str, Any]) -> str:
    """Return the schema as a grammar."""
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})


KINDS: dict[str, str] = {
    "any JSON object": grammar_of({"type": "object"}),
    "fields of many kinds": grammar_of(schema_of(0)),
    "text of 20 to 80 characters": grammar_of({"type": "string", "minLength": 20, "maxLength": 80}),
    "choice of 1000": grammar_of({"enum": [f"the choice number {number}" for number in range(1000)]}),
    "100 optional fields": grammar_of(
        {"type": "object", "properties": {f"field_{number}": {"type": "integer"} for number in range(100)}}
    ),
    "pattern": grammar_of({"type": "string", "pattern": r"^[A-Z][a-z]+ [0-9]{4}-[0-9]{2}-[0-9]{2}( \w+){5,30}$"}),
}


class Arm(NamedTuple):
    """Requests of one kind."""

    grammars: tuple[str, ...]
    temperature: float


class StepTime(NamedTuple):
    """Time of a step by the clock, and the time that cores worked for it, which other processes disturb less."""

    seconds: float
    cpu_seconds: float


class Harness:
    """One engine, and the vocabulary of its grammars."""

    def __init__(self, shape: dict[str, Any], num_steps: int) -> None:
        """`num_steps`: tokens of every request that a throughput is measured over."""
        self._num_steps = num_steps
        self.tokenizer = trained_tokenizer(shape["vocab_size"])
        config = parse_model_config(shape)
        self.vocabulary: LLTokenizer = grammar_vocabulary(
            self.tokenizer, vocab_size=config.vocab_size, eos_token_ids=(EOS,)
        )
        dtype = "bfloat16" if has_native_bfloat16() else "float32"
        weights = random_weights(config, 0, torch_dtype(dtype), torch.device("cpu"), None)
        num_blocks = 2 * NUM_REQUESTS * blocks_for(MAX_CONTEXT_LEN, BLOCK_SIZE)
        self.compiler = GrammarCompiler(lambda: self.vocabulary)
        self.dtype = dtype
        self._vocab_size = config.vocab_size
        self.engine = Engine(
            model=Decoder(config, weights),
            storage=BlockStorage(config.block_layout(BLOCK_SIZE, dtype), num_blocks),
            max_sequences=2 * NUM_REQUESTS,
            max_context_len=MAX_CONTEXT_LEN,
            masks=TokenMasks(
                self.compiler, vocab_size=config.vocab_size, eos_token_ids=(EOS,), num_threads=num_cores()
            ),
        )

    def add(self, number: int, sampling: SamplingParams) -> RequestId:
        """Add a request with blocks of its own."""
        request_id, width = RequestId(f"r{number}"), blocks_for(MAX_CONTEXT_LEN, BLOCK_SIZE)
        prompt = tuple(random.Random(number).randrange(1, self._vocab_size) for _ in range(PROMPT_LEN))
        blocks = tuple(BlockId(block) for block in range(number * width, (number + 1) * width))
        self.engine.add_sequence(NewSequence(request_id, prompt, PROMPT_LEN, 0, blocks, sampling))
        return request_id

    def decode_in_turns(self, arms: "tuple[Arm, ...]") -> "list[list[StepTime]]":
        """Decode the requests of each arm together, a step of one arm after a step of the other, in changing order."""
        ids = [
            [
                self.add(
                    at * NUM_REQUESTS + number,
                    SamplingParams(
                        max_tokens=200, temperature=arm.temperature, seed=number, ignore_eos=True, grammar=grammar
                    ),
                )
                for number, grammar in enumerate(arm.grammars)
            ]
            for at, arm in enumerate(arms)
        ]
        for own in ids:
            self.engine.execute([(request_id, PROMPT_LEN) for request_id in own])
        times: list[list[StepTime]] = [[] for _ in arms]
        for number in range(self._num_steps):
            for at in sorted(range(len(arms)), reverse=bool(number % 2)):
                times[at].append(self._step(ids[at]))
        for request_id in itertools.chain(*ids):
            self.engine.remove_sequence(request_id)
        return times

    def _step(self, ids: list[RequestId]) -> "StepTime":
        started, started_cpu = time.perf_counter(), time.process_time()
        output = self.engine.execute([(request_id, 1) for request_id in ids])
        assert not output.failed, output.reasons
        return StepTime(time.perf_counter() - started, time.process_time() - started_cpu)

    def first_token_s(self, grammar: str) -> float:
        """Return the time from the arrival of a request to its first token."""
        started = time.perf_counter()
        if grammar:
            self.compiler.compile(grammar)
        request_id = self.add(0, SamplingParams(temperature=0.0, grammar=grammar))
        self.engine.execute([(request_id, PROMPT_LEN)])
        seconds = time.perf_counter() - started
        self.engine.remove_sequence(request_id)
        return seconds


def throughput(harness: Harness, temperature: float) -> dict[str, Any]:
    """Compare both arms, step by step: medians of steps, and of their ratios in pairs."""
    free = Arm(("",) * NUM_REQUESTS, temperature)
    bound = Arm(tuple(grammar_of(schema_of(number)) for number in range(NUM_REQUESTS)), temperature)
    harness.decode_in_turns((free, bound))
    rounds = [harness.decode_in_turns((free, bound)) for _ in range(NUM_ROUNDS)]
    pairs = [pair for times in rounds for pair in zip(*times, strict=True)]
    return {
        "temperature": temperature,
        "num_steps": len(pairs),
        "free_tokens_per_s": round(NUM_REQUESTS / statistics.median(one.seconds for one, _ in pairs), 1),
        "constrained_tokens_per_s": round(NUM_REQUESTS / statistics.median(one.seconds for _, one in pairs), 1),
        "constrained_over_free": _ratio(pairs, 0),
        "constrained_over_free_by_cpu_time": _ratio(pairs, 1),
    }


def _ratio(pairs: list[tuple[StepTime, ...]], at: int) -> float:
    return round(statistics.median(free[at] / bound[at] for free, bound in pairs), 4)


def first_tokens(harness: Harness) -> dict[str, float]:
    """Compare the times of first tokens with a new schema of 2 KB and without one, interleaved."""
    times: dict[str, list[float]] = {"free_ms": [], "constrained_ms": []}
    sizes = []
    for number in range(NUM_FIRST_TOKENS):
        grammar = grammar_of(schema_of(1000 + number, 16))
        sizes.append(len(grammar))
        times["free_ms"].append(harness.first_token_s("") * 1e3)
        times["constrained_ms"].append(harness.first_token_s(grammar) * 1e3)
    medians = {name: round(statistics.median(values), 2) for name, values in times.items()}
    return {**medians, "grammar_bytes": statistics.median(sizes)}


def mask_costs(harness: Harness) -> Iterator[dict[str, Any]]:
    """Yield the times of compiling, of a mask and of a token, along random answers of each kind."""
    for kind, grammar in KINDS.items():
        matcher, compile_s = timed(partial(LLMatcher, harness.vocabulary, grammar, limits=PARSER_LIMITS))
        _, first_s = timed(matcher.compute_bitmask)
        masks: list[float] = []
        consumed: list[float] = []
        for seed in range(8):
            walk(matcher.deep_copy(), random.Random(seed), masks, consumed)
        yield {
            "kind": kind,
            "compile_ms": round(compile_s * 1e3, 2),
            "first_mask_us": round(first_s * 1e6, 1),
            "mask_us": round(statistics.mean(masks) * 1e6, 1),
            "mask_p99_us": round(float(np.quantile(masks, 0.99)) * 1e6, 1),
            "consume_us": round(statistics.mean(consumed) * 1e6, 1),
        }


def walk(matcher: LLMatcher, rng: random.Random, masks: list[float], consumed: list[float]) -> None:
    """Follow a random answer, and note the times of its masks and tokens."""
    for _ in range(100):
        bits, seconds = timed(matcher.compute_bitmask)
        masks.append(seconds)
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little"))
        token_id = int(allowed[rng.randrange(len(allowed))])
        if token_id == EOS:
            return
        _, seconds = timed(partial(matcher.consume_token, token_id))
        consumed.append(seconds)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result and the seconds."""
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wide", action="store_true", help="the larger vocabulary")
    arguments = parser.parse_args()
    torch.set_num_threads(num_cores())
    shape = QWEN2_05B if arguments.wide else OPT_125M
    harness = Harness(shape, 8 if arguments.wide else 24)
    figures = {
        "model": shape["model_type"],
        "dtype": harness.dtype,
        "vocab_size": shape["vocab_size"],
        "load_average": os.getloadavg()[0],
        "num_tokens_of_text": harness.tokenizer.vocab_size,
        "throughput": [throughput(harness, temperature) for temperature in ((0.0,) if arguments.wide else (0.0, 1.0))],
        "first_token": first_tokens(harness),
        "masks": list(mask_costs(harness)),
    }
    print(figures)
    write_result("grammar_masks_wide" if arguments.wide else "grammar_masks", figures)


if __name__ == "__main__":
    main()
