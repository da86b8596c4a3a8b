"""Time to the first token of each turn of a conversation, with the prefix cache and without.

    python -m benchmarks.prefix_cache.conversation_turns [--shape llama-135m] [--conversations 5]

A model of SmolLM2's shape (135M) with random weights in bfloat16, one worker, one conversation at a time. Every turn
adds 200 tokens: 168 of the user and the 32 of the answer before. `alone`: a prompt of 200 tokens that share nothing, as
the tenth turn would take if the history cost nothing at all; `engine`: the engine's own time for the tenth turn's new
tokens, which read the history, without a server. Both servers run side by side and take turns, so that whatever else
the machine does falls on both. Targets for the tenth turn: a fifth of the time without the cache, and 1.3 times its new
tokens alone.
"""

import argparse
import asyncio
import contextlib
import random
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.loadgen.client import CompletionApi, CompletionCall, CompletionOutcome, OpenAiClient
from alignedserve.microbench.engine.throughput import load_decoder
from alignedserve.runtime.engine.engine import Engine, NewSequence
from alignedserve.runtime.kv.block_storage import BlockStorage
from benchmarks.scheduling.live_policies import served
from benchmarks.support.model_folders import FOLDER_SHAPES, make_model_folder
from benchmarks.support.recording import write_result

NUM_TURNS = 10
TURN_TOKENS = 200
ANSWER_TOKENS = 32
_FIRST_WORD = 258  # of the made-up words that are tokens
_WORD = re.compile(r" w(\d+)")
_ENGINE_RUNS = 9
_SETTINGS = ("decode.kv_cache_bytes=1GiB", "decode.max_num_batched_tokens=2048")


def user_tokens(rng: random.Random, count: int) -> list[int]:
    """Return so many tokens that no other call returns."""
    return [rng.randrange(_FIRST_WORD, 40_000) for _ in range(count)]


def answer_tokens(text: str) -> list[int]:
    """Return the tokens of an answer; one that is not a word ends what can be told."""
    return [int(number) for number in _WORD.findall(text)]


async def first_token(client: OpenAiClient, model: str, prompt: Sequence[int]) -> tuple[float, CompletionOutcome]:
    """Complete a prompt; return the seconds to its first token, and all that came."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    outcome = await client.complete(CompletionCall(CompletionApi.COMPLETIONS, body), CompletionOutcome())
    assert outcome.failure is None, outcome.failure
    return outcome.token_times_s[0] - outcome.sent_s, outcome


async def converse(clients: dict[str, OpenAiClient], model: str, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Hold one conversation with each server, turn by turn; return what each turn took."""
    rng = random.Random(seed)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in clients}
    contexts: dict[str, list[int]] = {name: [] for name in clients}
    answers: dict[str, list[int]] = {name: [] for name in clients}
    for _ in range(NUM_TURNS):
        asked = user_tokens(rng, TURN_TOKENS)
        for name, client in clients.items():
            new = [*answers[name], *asked][:TURN_TOKENS]
            contexts[name] += new
            ttft_s, outcome = await first_token(client, model, contexts[name])
            answers[name] = answer_tokens(outcome.text)
            alone_s, _ = await first_token(client, model, user_tokens(rng, TURN_TOKENS))
            turns[name].append(
                {
                    "prompt_tokens": len(contexts[name]),
                    "cached_tokens": outcome.num_cached_tokens,
                    "ttft_s": ttft_s,
                    "alone_s": alone_s,
                }
            )
    return turns


def engine_s(folder: Path, num_tokens: int, num_cached: int) -> float:
    """Return the median time in which the engine computes a prompt whose first tokens are cached."""
    decoder = load_decoder(str(folder), "bfloat16")
    block_size = 16
    num_blocks = blocks_for(num_tokens + 1, block_size)
    storage = BlockStorage(decoder.config.block_layout(block_size, "bfloat16"), num_blocks)
    engine = Engine(model=decoder, storage=storage, max_sequences=1, max_context_len=num_tokens + 1)
    rng, request_id, times_s = random.Random(0), RequestId("r"), []
    for _ in range(_ENGINE_RUNS):
        token_ids = tuple(user_tokens(rng, num_tokens))
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        blocks = tuple(BlockId(number) for number in range(num_blocks))
        engine.add_sequence(NewSequence(request_id, token_ids, num_tokens, num_cached, blocks, sampling))
        began_s = time.perf_counter()
        engine.execute([(request_id, num_tokens - num_cached)])
        times_s.append(time.perf_counter() - began_s)
        engine.remove_sequence(request_id)
    return statistics.median(times_s)


def medians(conversations: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the medians of each turn over conversations."""
    return [
        {name: round(statistics.median(turn[name] for turn in turns), 5) for name in turns[0]}
        for turns in zip(*conversations, strict=True)
    ]


async def measure(ports: dict[str, int], num_conversations: int) -> dict[str, list[dict[str, Any]]]:
    """Return each server's turns: medians over conversations, the first of which warms up."""
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(OpenAiClient(url=f"http://127.0.0.1:{port}", timeout_s=120.0))
            for name, port in ports.items()
        }
        model = await next(iter(clients.values())).model_name()
        held = [await converse(clients, model, seed) for seed in range(num_conversations + 1)][1:]
    return {name: medians([turns[name] for turns in held]) for name in ports}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=FOLDER_SHAPES, default="llama-135m")
    parser.add_argument("--conversations", type=int, default=5)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = make_model_folder(Path(name) / "model", FOLDER_SHAPES[options.shape])
        with contextlib.ExitStack() as stack:
            ports = {}
            for system, is_enabled in (("cached", "true"), ("without", "false")):
                more = (*_SETTINGS, "model.max_context_len=4096", f"prefix_cache.enabled={is_enabled}")
                ports[system] = stack.enter_context(served(folder, "aligned_slo", "elastic", more_settings=more))
            turns = asyncio.run(measure(ports, options.conversations))
        last = turns["cached"][-1]
        new_tokens_s = engine_s(folder, int(last["prompt_tokens"]), int(last["cached_tokens"]))
    last_without = turns["without"][-1]
    figures = {
        "shape": options.shape,
        "conversations": options.conversations,
        "turns": turns,
        "tenth_turn_speedup": round(last_without["ttft_s"] / last["ttft_s"], 2),
        "tenth_turn_over_alone": round(last["ttft_s"] / last["alone_s"], 2),
        "tenth_turn_over_engine": round(last["ttft_s"] / new_tokens_s, 2),
        "engine_s": round(new_tokens_s, 5),
    }
    for cached, without in zip(turns["cached"], turns["without"], strict=True):
        print(cached, without, flush=True)
    print({name: figures[name] for name in figures if name.startswith("tenth_turn")})
    print(write_result("conversation_turns", figures))


if __name__ == "__main__":
    main()
