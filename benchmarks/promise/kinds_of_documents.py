"""Chat beside documents of every kind that the APIs take: does any kind cost a chat its objectives?

    python -m benchmarks.promise.kinds_of_documents                    # three minutes, the pocket model, two cores
    python -m benchmarks.promise.kinds_of_documents --topology disaggregated
    python -m benchmarks.promise.kinds_of_documents --only schemas adapters

A server of the pocket model. Chats of 30 tokens come at 2.5 a second, whatever those before them take: alone, then
beside 32 outstanding documents (`flex`) of one kind after another. A chat names its objectives, and holds them with
its first token within `--ttft` and within `--tpot` for each other one. Each kind is measured from its third second on.
"""

import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from rich.console import Console
from rich.table import Table

from alignedserve.client.sse import SseParser
from alignedserve.core.metrics import percentile
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.named_models import pocket_folder
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.models import make_adapters
from benchmarks.measuring.recording import read_figures, write_result
from benchmarks.measuring.server import TOPOLOGIES, served

RECORD = "serving/kinds_of_documents"
MODEL = "pocket"
OUTSTANDING = 32
CHATS_PER_S, CHAT_LEN = 2.5, 30
NUM_ADAPTERS, MAX_ADAPTERS = 24, 8
_WARM_UP_S = 3.0
_WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "many", "things", "in", "town", "while", "rain", "fell")

Body = dict[str, Any]


class Document(NamedTuple):
    """A request of best effort."""

    path: str
    body: Body


def _words(count: int) -> str:
    return " ".join(random.choice(_WORDS) for _ in range(count))


def chat(number: int, **more: Any) -> Document:
    messages = [{"role": "user", "content": f"{number} {_words(60)}"}]
    return Document("chat/completions", {"messages": messages, "max_tokens": 200, "ignore_eos": True, **more})


def _constrained(number: int, **more: Any) -> Document:
    document = chat(number, **more)
    del document.body["ignore_eos"]
    return document


def _completion(prompt: Any, max_tokens: int, **more: Any) -> Document:
    return Document("completions", {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more})


def _schema(number: int) -> Document:
    fields = {f"k{number}_{at}": {"type": random.choice(["string", "integer", "boolean"])} for at in range(30)}
    schema = {"type": "object", "properties": fields, "required": list(fields)[:15]}
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    return _constrained(number, response_format=form)


def _expression(number: int) -> Document:
    options = ["".join(random.choice("abcdefgh") for _ in range(30)) for _ in range(200)]
    return _constrained(number, structured_outputs={"regex": f"({'|'.join(options)})+"})


def _tools(number: int) -> Document:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "number"}}}
    functions = [{"name": f"f{number}_{at}", "parameters": parameters} for at in range(6)]
    tools = [{"type": "function", "function": function} for function in functions]
    return _constrained(number, tools=tools, tool_choice="required")


KINDS: Mapping[str, Callable[[int], Document]] = {
    "plain": chat,
    "long prompts": lambda number: _completion(f"{number} {_words(700)}", 100),
    "long answers": lambda number: _completion(f"{number} {_words(10)}", 1900),
    "schemas": _schema,
    "expressions": _expression,
    "tools": _tools,
    "16 choices": lambda number: chat(number, n=16),
    "20 log-probabilities": lambda number: chat(number, logprobs=True, top_logprobs=20),
    "of the prompt": lambda number: _completion(f"{number} {_words(800)}", 5, echo=True, logprobs=5),
    "stop strings": lambda number: chat(number, stop=["zzzq", "qqqz", "xxxy", "wvut"]),
    "biases and penalties": lambda number: chat(
        number, logit_bias={str(token): -1 for token in range(300)}, frequency_penalty=1.5, presence_penalty=1.0
    ),
    "200 prompts at once": lambda number: _completion([f"{number} {_words(20)}" for _ in range(200)], 20),
    "embeddings of 100": lambda number: Document("embeddings", {"input": [f"{number} {_words(100)}"] * 100}),
    "responses": lambda number: Document("responses", {"input": f"{number} {_words(60)}", "max_output_tokens": 200}),
    "adapters": lambda number: chat(number, model=f"adapter{number % NUM_ADAPTERS}"),
}


class Seen(NamedTuple):
    """What one stream saw; seconds."""

    ttft_s: float
    longest_gap_s: float
    tpot_s: float


async def stream(session: aiohttp.ClientSession, document: Document, objectives: Mapping[str, str]) -> Seen:
    """Return what a client sees of a stream. Raises RuntimeError if it is refused, or has no token."""
    began, times, parser = time.perf_counter(), list[float](), SseParser()
    body = {"model": MODEL, "stream": True} | document.body
    async with session.post(f"/v1/{document.path}", json=body, headers=objectives) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.text())[:300]}")
        async for received in response.content.iter_any():
            times += [time.perf_counter()] * bool(parser.feed(received))
    if not times:
        raise RuntimeError("a stream without a token")
    gaps = [after - before for before, after in itertools.pairwise(times)]
    # By the tokens: an event may bring several, where only the last of them ends a character.
    return Seen(times[0] - began, max(gaps, default=0.0), (times[-1] - times[0]) / (CHAT_LEN - 1))


async def answer(session: aiohttp.ClientSession, document: Document) -> int:
    """Return the tokens of a document's whole answer, or of what it embeds. Raises RuntimeError if it is refused."""
    body = {"model": MODEL, "service_tier": "flex"} | document.body
    async with session.post(f"/v1/{document.path}", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.text())[:300]}")
        usage = (await response.json())["usage"]
    return int(usage.get("completion_tokens", usage.get("output_tokens", usage["total_tokens"])))


class Documents:
    """Keeps documents of one kind outstanding."""

    def __init__(self, session: aiohttp.ClientSession, kind: Callable[[int], Document]) -> None:
        self._session, self._kind = session, kind
        self._numbers = itertools.count()
        self.num_ended = self.num_tokens = 0

    async def keep(self) -> None:
        """Send one after another; to be cancelled. Raises RuntimeError if one is refused."""
        while True:
            num_tokens = await answer(self._session, self._kind(next(self._numbers)))
            self.num_tokens += num_tokens
            self.num_ended += 1


async def measure(
    port: int, kind: Callable[[int], Document] | None, duration_s: float, objectives: Mapping[str, str]
) -> dict[str, Any]:
    """Return what chats see beside documents of a kind, and how many of these end. None: alone.

    `objectives`: headers of the chats.
    """
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector, timeout=timeout) as session:
        documents = Documents(session, kind or chat)
        kept = [asyncio.create_task(documents.keep()) for _ in range(OUTSTANDING if kind is not None else 0)]
        await asyncio.sleep(_WARM_UP_S if kept else 0.0)
        began, before, chats = time.perf_counter(), (documents.num_ended, documents.num_tokens), list[Any]()
        for number in range(int(duration_s * CHATS_PER_S)):
            await asyncio.sleep(max(began + number / CHATS_PER_S - time.perf_counter(), 0.0))
            chats.append(asyncio.create_task(stream(session, chat(number, max_tokens=CHAT_LEN), objectives)))
        seen = await asyncio.gather(*chats)
        seconds = time.perf_counter() - began
        failed = [one for one in kept if one.done()]
        for one in kept:
            one.cancel()
        await asyncio.gather(*kept, return_exceptions=True)
        if failed:
            failed[0].result()
    return {
        "chats": [one._asdict() for one in seen],
        "documents_per_s": (documents.num_ended - before[0]) / seconds,
        "documents_tokens_per_s": (documents.num_tokens - before[1]) / seconds,
    }


def row_of(kind: str, figures: Mapping[str, Any], ttft_s: float, tpot_s: float) -> dict[str, Any]:
    chats = [Seen(**one) for one in figures["chats"]]
    held = [one.ttft_s <= ttft_s and one.tpot_s <= tpot_s for one in chats]
    tpots = sorted(one.tpot_s for one in chats)
    firsts, gaps = sorted(one.ttft_s for one in chats), sorted(one.longest_gap_s for one in chats)
    return {
        "kind": kind,
        "num_chats": len(chats),
        "held": sum(held) / len(held),
        "ttft_s": {"p50": statistics.median(firsts), "p99": percentile(firsts, 99.0), "longest": firsts[-1]},
        "tpot_s": {"p50": tpots[len(tpots) // 2], "longest": tpots[-1]},
        "longest_gap_s": {"p50": statistics.median(gaps), "longest": gaps[-1]},
        "documents_per_s": figures["documents_per_s"],
        "documents_tokens_per_s": figures["documents_tokens_per_s"],
    }


def show(rows: list[dict[str, Any]]) -> None:
    heads = ("first token p50, p99, longest, s", "a token p50, longest, s", "longest gap p50, max, s")
    table = Table("documents", "held", *heads, "ended/s, tokens/s")
    for row in rows:
        ttft, tpot, gap = row["ttft_s"], row["tpot_s"], row["longest_gap_s"]
        table.add_row(
            row["kind"],
            f"{row['held']:.1%}",
            f"{ttft['p50']:.3f}, {ttft['p99']:.3f}, {ttft['longest']:.3f}",
            f"{tpot['p50']:.3f}, {tpot['longest']:.3f}",
            f"{gap['p50']:.3f}, {gap['longest']:.3f}",
            f"{row['documents_per_s']:.1f}, {row['documents_tokens_per_s']:.0f}",
        )
    Console().print(table)


def main() -> None:
    """Measure, show and record."""
    parser = parser_of(__doc__)
    parser.add_argument("--topology", choices=TOPOLOGIES, default="elastic")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--duration", type=float, default=10.0, help="seconds of each kind")
    parser.add_argument("--ttft", type=float, default=1.0)
    parser.add_argument("--tpot", type=float, default=0.1)
    options = parser.parse_args()
    random.seed(1)
    objectives = {"x-slo-ttft-ms": f"{1e3 * options.ttft:g}", "x-slo-tpot-ms": f"{1e3 * options.tpot:g}"}
    with tempfile.TemporaryDirectory() as folder:
        adapters = make_adapters(Path(folder), read_config(pocket_folder()), NUM_ADAPTERS)
        settings = [f"lora.adapters.{name}={path}" for name, path in adapters.items()]
        with served("pocket", [*settings, f"lora.max_adapters={MAX_ADAPTERS}", f"topology={options.topology}"]) as port:
            rows = []
            for name in ("alone", *options.only):
                seen = asyncio.run(measure(port, KINDS.get(name), options.duration, objectives))
                rows.append(row_of(name, seen, options.ttft, options.tpot))
                show(rows[-1:])
    show(rows)
    if options.only == list(KINDS):
        figures = {"ttft_s": options.ttft, "tpot_s": options.tpot, "rows": rows}
        write_result(RECORD, (read_figures(RECORD) or {}) | {options.topology: figures})


if __name__ == "__main__":
    main()
