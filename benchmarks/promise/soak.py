"""Everything at once for half an hour: does a process keep memory of what has ended, or does chat get slower?

    python -m benchmarks.promise.soak                        # half an hour, the pocket model, two cores
    python -m benchmarks.promise.soak --minutes 5 --topology disaggregated

A server of the pocket model, with chats at 2.5 a second and 32 outstanding documents of every kind that the APIs take
(`kinds_of_documents`). A tenth of both is given up by its client in the middle. Beside them responses are stored, go
on and are deleted, and batches of fifty lines are submitted, read and deleted. Every half minute the memory that each
process has for itself is looked up: after the first third, in which caches fill, it is to stay.

Run it alone: beside other work on two cores chats are late. Grammars, and courses of requests, which are kept for an
hour, fill their room for longer than the first third of half an hour.
"""

import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from rich.console import Console
from rich.table import Table

from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.named_models import pocket_folder
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.models import make_adapters
from benchmarks.measuring.recording import read_figures, write_result
from benchmarks.measuring.server import TOPOLOGIES, served
from benchmarks.promise.kinds_of_documents import (
    CHAT_LEN,
    CHATS_PER_S,
    KINDS,
    MAX_ADAPTERS,
    MODEL,
    NUM_ADAPTERS,
    OUTSTANDING,
    answer,
    chat,
    stream,
)

RECORD = "serving/soak"
OBJECTIVES = {"x-slo-ttft-ms": "1000", "x-slo-tpot-ms": "100"}
GIVEN_UP = 0.1  # of chats and documents
NUM_LINES, BATCH_EVERY_S = 50, 20.0
LOOK_EVERY_S = 30.0
_MIB = 1 << 20


@dataclass
class Soak:
    """The load, and what is seen of it."""

    session: aiohttp.ClientSession
    began_s: float = field(default_factory=time.monotonic)
    chats: list[tuple[float, float, float]] = field(default_factory=list)  # begin, first token, seconds for each other
    counts: Counter[str] = field(default_factory=Counter)
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))  # s, MiB
    problems: list[str] = field(default_factory=list)

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began_s

    async def send_chats(self) -> None:
        """Send chats at their rate, whatever those before them take; to be cancelled."""
        async with asyncio.TaskGroup() as chats:
            for number in itertools.count():
                await asyncio.sleep(max(number / CHATS_PER_S - self.now_s, 0.0))
                chats.create_task(self._chat(number))

    async def _chat(self, number: int) -> None:
        began_s, is_given_up = self.now_s, random.random() < GIVEN_UP
        with suppress(TimeoutError):
            async with asyncio.timeout(random.uniform(0.0, 0.3) if is_given_up else None):
                await self._noting(self._whole_chat(number, began_s), "chats")
            return
        self.counts["chats given up"] += 1

    async def _whole_chat(self, number: int, began_s: float) -> None:
        seen = await stream(self.session, chat(number, max_tokens=CHAT_LEN), OBJECTIVES)
        self.chats.append((began_s, seen.ttft_s, seen.tpot_s))

    async def keep_documents(self) -> None:
        """Send documents of all kinds, one after another; to be cancelled."""
        while True:
            kind = random.choice(list(KINDS))
            is_given_up = random.random() < GIVEN_UP
            try:
                async with asyncio.timeout(random.uniform(0.0, 5.0) if is_given_up else None):
                    await self._noting(answer(self.session, KINDS[kind](random.getrandbits(32))), kind)
            except TimeoutError:
                self.counts["documents given up"] += 1

    async def keep_responses(self) -> None:
        """Store responses that go on from one to the next, and delete them; to be cancelled."""
        while True:
            former: list[str] = []
            for number in range(8):
                body = {"model": MODEL, "input": f"count from {number} to 9", "max_output_tokens": 40}
                if former:
                    body["previous_response_id"] = former[-1]
                async with self.session.post("/v1/responses", json=body) as response:
                    told = await response.json()
                if response.status != 200:
                    self.problems.append(f"responses: {response.status}")
                    break
                former.append(told["id"])
                self.counts["stored responses"] += 1
            for one in former:
                async with self.session.delete(f"/v1/responses/{one}"):
                    pass
            await asyncio.sleep(1.0)

    async def keep_batches(self) -> None:
        """Submit batches, wait for their ends, read and delete what is left of them; to be cancelled."""
        for number in itertools.count():
            begin = asyncio.create_task(asyncio.sleep(BATCH_EVERY_S))
            await self._noting(self._batch(number), "batches")
            await begin

    async def _batch(self, number: int) -> None:
        lines = [
            {
                "custom_id": f"{number}-{line}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": chat(line, model=MODEL, max_tokens=60).body,
            }
            for line in range(NUM_LINES)
        ]
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(json.dumps(line) for line in lines), filename="lines.jsonl")
        file_id = (await self._json("POST", "/v1/files", data=form))["id"]
        asked = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = await self._json("POST", "/v1/batches", json=asked)
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(1.0)
            batch = await self._json("GET", f"/v1/batches/{batch['id']}")
        output_id = batch["output_file_id"]
        async with self.session.get(f"/v1/files/{output_id}/content") as response:
            answered = {json.loads(line)["custom_id"] for line in (await response.text()).splitlines()}
        if answered != {line["custom_id"] for line in lines}:
            raise RuntimeError(f"a batch of {NUM_LINES} lines has {len(answered)} answers, and is {batch['status']}")
        for one in (file_id, output_id):
            await self._json("DELETE", f"/v1/files/{one}")

    async def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        async with self.session.request(method, path, **options) as response:
            if response.status != 200:
                raise RuntimeError(f"{method} {path}: {response.status}: {(await response.text())[:200]}")
            told: dict[str, Any] = await response.json()
            return told

    async def _noting(self, work: Awaitable[object], name: str) -> None:
        try:
            await work
            self.counts[name] += 1
        except (RuntimeError, aiohttp.ClientError) as error:
            self.problems.append(f"{name} after {self.now_s:.1f} s: {error!r}")

    async def watch(self) -> None:
        """Look up the memory of each process again and again; to be cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for name, mib in (await asyncio.to_thread(memory_by_process)).items():
                self.memory[name].append((self.now_s, mib))


def memory_by_process() -> dict[str, float]:
    found: dict[str, float] = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            words = process.cmdline()
            name = words[0] if words and words[0].startswith(("ray::", "alignedserve")) else " ".join(words[1:3])[-40:]
            found[f"{name or process.name()} ({process.pid})"] = process.memory_full_info().uss / _MIB
    return found


async def soak(port: int, seconds: float) -> Soak:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector, timeout=timeout) as session:
        load = Soak(session)
        kept = [load.keep_documents() for _ in range(OUTSTANDING)]
        tasks = [
            asyncio.create_task(one)
            for one in (*kept, load.send_chats(), load.keep_responses(), load.keep_batches(), load.watch())
        ]
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        failed = [one for one in tasks if one.done()]
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if failed:
            failed[0].result()
        return load


def figures_of(load: Soak, seconds: float) -> dict[str, Any]:
    thirds: list[dict[str, Any]] = []
    for third in range(3):
        begin_s, end_s = seconds * third / 3, seconds * (third + 1) / 3
        chats = [(ttft_s, tpot_s) for at_s, ttft_s, tpot_s in load.chats if begin_s <= at_s < end_s]
        held = [ttft_s <= 1.0 and tpot_s <= 0.1 for ttft_s, tpot_s in chats]
        firsts = sorted(ttft_s for ttft_s, _ in chats)
        memory = {
            name: round(statistics.median(mib for at_s, mib in looks if begin_s <= at_s < end_s), 1)
            for name, looks in load.memory.items()
            if any(begin_s <= at_s < end_s for at_s, _ in looks)
        }
        thirds.append(
            {
                "num_chats": len(chats),
                "held": sum(held) / max(len(held), 1),
                "ttft_p50_s": statistics.median(firsts) if firsts else None,
                "ttft_longest_s": firsts[-1] if firsts else None,
                "memory_mib": memory,
            }
        )
    return {"seconds": seconds, "ended": dict(load.counts), "problems": load.problems[:20], "thirds": thirds}


def show(figures: dict[str, Any]) -> None:
    thirds = figures["thirds"]
    table = Table("", "first third", "second", "last")
    table.add_row("chats", *(str(one["num_chats"]) for one in thirds))
    table.add_row("both objectives held", *(f"{one['held']:.2%}" for one in thirds))
    firsts = (f"{one['ttft_p50_s']:.3f}, {one['ttft_longest_s']:.3f}" for one in thirds)
    table.add_row("first token p50, longest, s", *firsts)
    for name in thirds[-1]["memory_mib"]:
        table.add_row(f"{name}, MiB", *(str(one["memory_mib"].get(name, "-")) for one in thirds))
    console = Console()
    console.print(table)
    console.print("ended:", figures["ended"])
    for problem in figures["problems"]:
        console.print("problem:", problem, markup=False)


def main() -> None:
    """Load, show and record."""
    parser = parser_of(__doc__)
    parser.add_argument("--topology", choices=TOPOLOGIES, default="elastic")
    parser.add_argument("--minutes", type=float, default=30.0)
    options = parser.parse_args()
    random.seed(1)
    with tempfile.TemporaryDirectory() as folder:
        adapters = make_adapters(Path(folder), read_config(pocket_folder()), NUM_ADAPTERS)
        settings = [f"lora.adapters.{name}={path}" for name, path in adapters.items()]
        settings += [f"lora.max_adapters={MAX_ADAPTERS}", f"topology={options.topology}"]
        settings.append(f"batches.folder={folder}/state")
        with served("pocket", settings) as port:
            load = asyncio.run(soak(port, 60 * options.minutes))
    figures = figures_of(load, 60 * options.minutes)
    show(figures)
    write_result(RECORD, (read_figures(RECORD) or {}) | {options.topology: figures})


if __name__ == "__main__":
    main()
