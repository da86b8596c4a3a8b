"""Measures drafts: the same requests with and without, in alternation, on two servers of one worker.

    python -m benchmarks.engine.speculation [--model smollm2] [--rounds 3]

One stream that quotes (a page of our own is to be repeated with a word changed), one that talks freely, and 64 streams
that talk. Greedy answers must be the same. Targets: 1.8 times the tokens/s, no less than 0.98, no less than 0.99.
"""

import asyncio
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

from alignedserve.client.openai_client import CompletionApi, CompletionCall, CompletionOutcome, OpenAiClient
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from benchmarks.measuring.server import served

PAGES = Path(__file__).parents[2] / "docs"
_QUOTED, _TOPICS = 900, ("bread", "rivers", "trains", "clouds", "chess", "glass", "bees", "maps")  # characters
LOADS = {"quotes": (1, 4), "talks": (1, 4), "64 streams": (64, 1)}  # streams, requests of each


def prompts_of(load: str, count: int) -> list[str]:
    if load == "quotes":
        pages = [path.read_text(encoding="utf-8")[:_QUOTED] for path in sorted(PAGES.glob("*.md"))[:count]]
        return [f"Copy this text, and write `worker` as `engine`:\n\n{page}" for page in pages]
    return [f"Tell me about {_TOPICS[at % len(_TOPICS)]}, part {at // len(_TOPICS) + 1}." for at in range(count)]


async def measure(port: int, model: str, load: str) -> tuple[float, list[str]]:
    """Return output tokens a second, and the answers."""
    num_streams, num_requests = LOADS[load]
    prompts = prompts_of(load, num_streams * num_requests)
    async with OpenAiClient(url=f"http://127.0.0.1:{port}") as client:

        async def one(prompt: str, num_tokens: int) -> CompletionOutcome:
            messages = [{"role": "user", "content": prompt}]
            body = {"model": model, "messages": messages, "max_tokens": num_tokens, "temperature": 0}
            outcome = CompletionOutcome()
            await client.complete(CompletionCall(CompletionApi.CHAT, body), outcome)
            return outcome

        async def stream(mine: list[str]) -> list[CompletionOutcome]:
            return [await one(prompt, 160) for prompt in mine]

        await one(prompts[0], 8)
        began_s = time.perf_counter()
        streams = (stream(prompts[number::num_streams]) for number in range(num_streams))
        outcomes = list(itertools.chain.from_iterable(await asyncio.gather(*streams)))
        lasted_s = time.perf_counter() - began_s
    assert all(outcome.failure is None for outcome in outcomes), "a request failed"
    return sum(outcome.num_tokens for outcome in outcomes) / lasted_s, [outcome.text for outcome in outcomes]


def main() -> None:
    """Measure both servers in turn; print ratios and write the record."""
    parser = parser_of(__doc__, rounds=3, name="engine/speculation")
    parser.add_argument("--model", default="smollm2", help="a name, or a folder")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    is_on = {"on": "true", "off": "false"}
    for number in range(arguments.rounds):
        texts: dict[str, list[str]] = {}
        for name, value in sorted(is_on.items(), reverse=number % 2 == 1):  # each is the first in turn
            with served(arguments.model, [f"engine.speculation={value}", "batches.enabled=false"]) as port:
                for load in LOADS:
                    rate, answers = asyncio.run(measure(port, arguments.model, load))
                    rows.append({"round": number, "load": load, "speculation": name, "tokens_per_s": rate})
                    assert texts.setdefault(load, answers) == answers, f"{load}: other answers"
    ratios = {}
    for load in LOADS:
        rates: dict[str, list[float]] = {name: [] for name in is_on}
        for row in rows:
            if row["load"] == load:
                rates[row["speculation"]].append(row["tokens_per_s"])
        by_round = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
        ratios[load] = statistics.median(by_round)
        print(f"{load:12} {ratios[load]:.2f} times ({', '.join(f'{ratio:.2f}' for ratio in by_round)})")
    write_result(arguments.name, {"model": arguments.model, "ratios": ratios, "rows": rows})


if __name__ == "__main__":
    main()
