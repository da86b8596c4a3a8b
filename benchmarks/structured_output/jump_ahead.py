"""Throughput with and without jump ahead: answers under schemas of long keys, of short keys, and of free texts.

An OPT of 125M with random weights and a vocabulary of 50 000 tokens, trained on the sources of Python's library. The
answers of both arms are the same, which is checked; they are computed in turns.

    GOMP_SPINCOUNT=1000 python -m benchmarks.structured_output.jump_ahead
"""

import os
import random
import statistics
import time
from typing import Any, NamedTuple

import torch

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.device.cores import num_cores
from alignedserve.runtime.device.dtypes import has_native_bfloat16, torch_dtype
from alignedserve.runtime.engine.decoder import Decoder
from alignedserve.runtime.engine.engine import Engine, NewSequence
from alignedserve.runtime.grammar.compiler import GrammarCompiler
from alignedserve.runtime.grammar.token_masks import TokenMasks
from alignedserve.runtime.grammar.vocabulary import grammar_vocabulary
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.hf_config import parse_model_config
from alignedserve.runtime.model.random_weights import random_weights
from benchmarks.engine.grammar_masks import EOS, OPT_125M, grammar_of, trained_tokenizer
from benchmarks.support.recording import write_result

BLOCK_SIZE, MAX_CONTEXT_LEN, PROMPT_LEN = 16, 512, 32
MAX_TOKENS, TEMPERATURE = 200, 1.0
BATCH_SIZES, NUM_ROUNDS = (1, 16), 5
_VALUES: tuple[dict[str, Any], ...] = (
    {"type": "boolean"},
    {"type": "integer", "minimum": 0, "maximum": 999},
    {"enum": ["pending", "shipped", "delivered"]},
    {"type": "string", "maxLength": 12},
)
_LONG_KEYS = (
    *("customer_identifier", "is_delivery_address_verified", "number_of_ordered_articles", "current_order_status"),
    *("preferred_contact_language", "has_accepted_general_terms", "estimated_delivery_days", "priority_of_shipment"),
)


def _object(keys: tuple[str, ...], values: tuple[dict[str, Any], ...]) -> str:
    properties = {key: values[at % len(values)] for at, key in enumerate(keys)}
    schema = {"type": "object", "properties": properties, "required": list(keys), "additionalProperties": False}
    return grammar_of(schema)


KINDS = {
    "long keys": _object(_LONG_KEYS, _VALUES),
    "short keys": _object(("id", "ok", "n", "status", "lang", "terms", "days", "prio"), _VALUES),
    "a text": _object(("text",), ({"type": "string", "minLength": 400},)),
}


class Answers(NamedTuple):
    """The answers of one arm."""

    token_ids: list[tuple[int, ...]]
    num_steps: int
    seconds: float
    cpu_seconds: float

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.token_ids))


class Harness:
    """One model, and an engine that jumps ahead beside one that does not."""

    def __init__(self) -> None:
        config = parse_model_config(OPT_125M)
        vocabulary = grammar_vocabulary(
            trained_tokenizer(config.vocab_size), vocab_size=config.vocab_size, eos_token_ids=(EOS,)
        )
        self.dtype = "bfloat16" if has_native_bfloat16() else "float32"
        decoder = Decoder(config, random_weights(config, 0, torch_dtype(self.dtype), torch.device("cpu"), None))
        num_blocks = max(BATCH_SIZES) * blocks_for(MAX_CONTEXT_LEN, BLOCK_SIZE)
        compiler = GrammarCompiler(lambda: vocabulary)
        self._vocab_size = config.vocab_size
        self._engines = [
            Engine(
                model=decoder,
                storage=BlockStorage(config.block_layout(BLOCK_SIZE, self.dtype), num_blocks),
                max_sequences=max(BATCH_SIZES),
                max_context_len=MAX_CONTEXT_LEN,
                masks=TokenMasks(
                    compiler,
                    vocab_size=config.vocab_size,
                    eos_token_ids=(EOS,),
                    num_threads=num_cores(),
                    jumps_ahead=jumps_ahead,
                ),
            )
            for jumps_ahead in (False, True)
        ]

    def answer(self, grammar: str, num_requests: int, *, jumps_ahead: bool) -> Answers:
        """Decode requests together until all have ended; their blocks grow as those of a worker do."""
        engine, width = self._engines[jumps_ahead], blocks_for(MAX_CONTEXT_LEN, BLOCK_SIZE)
        ids = [RequestId(f"r{number}") for number in range(num_requests)]
        answers: dict[RequestId, list[int]] = {request_id: [] for request_id in ids}
        blocks = {key: [BlockId(number * width + at) for at in range(width)] for number, key in enumerate(ids)}
        for number, request_id in enumerate(ids):
            rng = random.Random(number)
            prompt = tuple(rng.randrange(1, self._vocab_size) for _ in range(PROMPT_LEN))
            sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=number, grammar=grammar)
            first = tuple(blocks[request_id].pop(0) for _ in range(blocks_for(PROMPT_LEN, BLOCK_SIZE)))
            engine.add_sequence(NewSequence(request_id, prompt, PROMPT_LEN, 0, first, sampling))
        held = dict.fromkeys(ids, blocks_for(PROMPT_LEN, BLOCK_SIZE))
        slices = [(request_id, PROMPT_LEN) for request_id in ids]
        num_steps, started, started_cpu = 0, time.perf_counter(), time.process_time()
        while slices:
            for request_id, _ in slices:
                if engine.num_tokens(request_id) > held[request_id] * BLOCK_SIZE:
                    engine.append_blocks(request_id, (blocks[request_id].pop(0),))
                    held[request_id] += 1
            output, num_steps = engine.execute(slices), num_steps + 1
            for token in output.sampled:
                answers[token.request_id].append(token.token_id)
            open_ids = [key for key, _ in slices if answers[key][-1] != EOS and len(answers[key]) < MAX_TOKENS]
            for request_id, _ in slices:
                if request_id not in open_ids:
                    engine.remove_sequence(request_id)
            slices = [(request_id, 1) for request_id in open_ids]
        spent = time.perf_counter() - started, time.process_time() - started_cpu
        return Answers([tuple(one) for one in answers.values()], num_steps, *spent)


def compare(harness: Harness, kind: str, num_requests: int) -> dict[str, Any]:
    """Compare both arms, in turns."""
    pairs = []
    for _ in range(NUM_ROUNDS + 1):
        plain, jumping = (harness.answer(KINDS[kind], num_requests, jumps_ahead=jumps) for jumps in (False, True))
        assert plain.token_ids == jumping.token_ids, "jumping has changed an answer"
        pairs.append((plain, jumping))
    plain, jumping = pairs[0]
    rounds = pairs[1:]  # the first computes what is kept
    return {
        "kind": kind,
        "num_requests": num_requests,
        "num_tokens": plain.num_tokens,
        "steps_without": plain.num_steps,
        "steps_with": jumping.num_steps,
        "tokens_per_s_without": round(statistics.median(one.num_tokens / one.seconds for one, _ in rounds), 1),
        "tokens_per_s_with": round(statistics.median(one.num_tokens / one.seconds for _, one in rounds), 1),
        "speedup": round(statistics.median(one.seconds / other.seconds for one, other in rounds), 3),
        "speedup_by_cpu_time": round(
            statistics.median(one.cpu_seconds / other.cpu_seconds for one, other in rounds), 3
        ),
    }


def main() -> None:
    """Measure, print and record."""
    torch.set_num_threads(num_cores())
    harness = Harness()
    figures: dict[str, Any] = {
        "dtype": harness.dtype,
        "load_average": os.getloadavg()[0],
        "temperature": TEMPERATURE,
        "arms": [],
    }
    for kind in KINDS:
        for num_requests in BATCH_SIZES:
            figures["arms"].append(compare(harness, kind, num_requests))
            print(figures["arms"][-1])
    write_result("jump_ahead", figures)


if __name__ == "__main__":
    main()
